// From positions in a sequence to rows in the pool.  Included inside `namespace kvir::<isa>`.

// The head-page of a unit that holds the rows of the request's `index`-th page; null if it has none.
static inline char* head_page(const CacheView& cache, const int32_t* pages, int64_t max_pages, int64_t index,
                              int64_t unit, int64_t page_bytes) {
    if (index >= max_pages) return nullptr;
    uint32_t logical = uint32_t(pages[index]);
    if (logical >= cache.logical_pages) return nullptr;
    uint32_t physical = uint32_t(cache.table[logical * cache.table_stride + unit]);
    if (physical >= cache.head_pages) return nullptr;
    return cache.kv + physical * page_bytes;
}

// One request's view of one unit.
struct UnitRows {
    const CacheView& cache;
    const int32_t* pages;
    int64_t max_pages, unit, row_bytes, page_bytes;

    UnitRows(const CacheView& c, const PagesView& p, int64_t request, int64_t unit_, int64_t element_bytes)
        : cache(c), pages(p.pages + request * p.stride), max_pages(p.max_pages), unit(unit_),
          row_bytes(c.head_size * element_bytes), page_bytes(2 * c.page_rows * row_bytes) {}

    // Appends to `keys` the addresses of the key rows at positions [lo, hi), and to `positions`, if given, the
    // positions; returns how many there are.  The value row of a key row lies page_rows rows further on.
    int64_t find(int64_t lo, int64_t hi, const char** keys, int32_t* positions, int64_t& holes) const {
        int64_t found = 0;
        while (lo < hi) {
            int64_t index = lo / cache.page_rows, offset = lo - index * cache.page_rows;
            int64_t n = cache.page_rows - offset < hi - lo ? cache.page_rows - offset : hi - lo;
            const char* page = head_page(cache, pages, max_pages, index, unit, page_bytes);
            if (page == nullptr) {
                holes += n;
            } else {
                const char* key = page + offset * row_bytes;
                for (int64_t i = 0; i < n; i++) keys[found + i] = key + i * row_bytes;
                if (positions)
                    for (int64_t i = 0; i < n; i++) positions[found + i] = int32_t(lo + i);
                found += n;
            }
            lo += n;
        }
        return found;
    }

    // Holes among positions [lo, hi).
    int64_t count_holes(int64_t lo, int64_t hi) const {
        int64_t holes = 0;
        while (lo < hi) {
            int64_t index = lo / cache.page_rows, end = (index + 1) * cache.page_rows;
            if (end > hi) end = hi;
            if (head_page(cache, pages, max_pages, index, unit, page_bytes) == nullptr) holes += end - lo;
            lo = end;
        }
        return holes;
    }
};
