// New rows into the pool.
#include "args.h"
#include "parallel.h"

#include <cstring>

namespace kvir {
namespace {

struct Append {
    static constexpr int64_t TOKENS = 64;  // per work item
    const AppendArgs& a;

    void operator()(int64_t index, int64_t) {
        const CacheView& c = a.cache;
        const int64_t last = (index + 1) * TOKENS < a.tokens ? (index + 1) * TOKENS : a.tokens;
        const int64_t row_bytes = c.head_size * a.element_bytes, half = c.page_rows * row_bytes;
        for (int64_t t = index * TOKENS; t < last; t++) {
            if (a.slots[t] < 0) continue;
            const int64_t page = a.slots[t] / c.page_rows, offset = a.slots[t] - page * c.page_rows;
            if (page >= c.logical_pages) continue;
            const int32_t* head_pages = c.table + page * c.table_stride + a.unit0;
            for (int64_t h = 0; h < a.kv_heads; h++) {
                const uint32_t head_page = uint32_t(head_pages[h]);
                if (head_page >= c.head_pages) continue;
                if (c.bias) c.bias[head_page * c.page_rows + offset] = 0;
                char* to = c.kv + (head_page * 2 * half + offset * row_bytes);
                const int64_t k = t * a.k_token_stride + h * a.k_head_stride;
                const int64_t v = t * a.v_token_stride + h * a.v_head_stride;
                std::memcpy(to, a.k + k * a.element_bytes, size_t(row_bytes));
                std::memcpy(to + half, a.v + v * a.element_bytes, size_t(row_bytes));
            }
        }
    }
};

}  // namespace

void append(const AppendArgs& a) {
    Append work{a};
    parallel_items(a.threads, (a.tokens + Append::TOKENS - 1) / Append::TOKENS, work);
}

}  // namespace kvir
