// Prefill attention: a chunk of queries per request.  Included inside `namespace kvir::<isa>`.
//
// The (token, query head of the group) pairs of one request and KV head are laid out token by token as lanes.  A work
// item is a block of BLOCK lanes; it walks over tiles of KEYS keys, packs each tile once and uses it for all of its
// sub-blocks.  Tiles that no lane of a sub-block sees are skipped.
//
// A short chunk after a long prefix makes few blocks, so the keys of its blocks are cut into segments, which are items
// of their own, merged by whoever finishes the last.  How, depends on the request's own lengths alone.

constexpr int BLOCK = 192;          // a multiple of every SUB
constexpr int SEGMENTS_MOST = 8;    // of all blocks of a (request, KV head) together
constexpr int SEGMENT_ROWS = 1024;  // no segment is much shorter

struct ExtendItem {
    int32_t request, head, block;
    int32_t first, segments;  // of the same block: its first item, how many
    int64_t token0;           // first token of the request in q
    int64_t from, to;         // of the rows that the block sees: first the sinks, then the window
    int64_t sink, start;      // which are positions [0, sink) and [start, last + 1)
};

template <class T> struct Extend {
    const ExtendArgs& a;
    TileAttention<T> math;
    const ExtendItem* items;
    const int32_t* order;
    float* partials;  // [item][sub_floats()] of items that are segments
    int32_t* left;    // at the first item of a block: segments not finished
    int64_t holes;
    int d, depth, group;

    static constexpr int PARTS = BLOCK / SUB;
    int64_t state_floats() const { return int64_t(SUB) * (d + 2); }  // o, m and l of a sub-block

    void operator()(int64_t index, int64_t) {
        const ExtendItem& item = items[order[index]];
        UnitRows unit(a.cache, a.pages, item.request, a.unit0 + item.head, sizeof(T));
        const int64_t recent = a.bounds.recent[a.unit0 + item.head];
        if (item.block == 0 && item.from == 0) count_holes(unit, item, recent);

        const int64_t block_floats = PARTS * (state_floats() + int64_t(SUB) * (depth + 1));
        float* memory = (float*)scratch(1, (block_floats + math.tile_floats(d, depth)) * sizeof(float));
        SubBlock parts[PARTS];
        const bool whole = item.segments == 1;
        const int count = lay_out(item, whole ? memory : partials + order[index] * PARTS * state_floats(), parts);
        float* rest = memory + PARTS * state_floats();
        for (int i = 0; i < count; i++) {
            parts[i].q = rest;
            parts[i].positions = (int32_t*)(rest + int64_t(SUB) * depth);
            rest += int64_t(SUB) * (depth + 1);
            begin(item, parts[i], i);
        }
        Tile tile;
        math.lay_out(tile, rest);

        tile.windowed = false;
        if (item.from < item.sink)
            walk(item, unit, item.from, item.to < item.sink ? item.to : item.sink, recent, tile, parts, count);
        tile.windowed = true;
        const int64_t shift = item.start - item.sink;
        if (item.to > item.sink)
            walk(item, unit, (item.from > item.sink ? item.from : item.sink) + shift, item.to + shift, recent, tile,
                 parts, count);

        if (!whole) {
            if (__atomic_fetch_sub(&left[item.first], 1, __ATOMIC_ACQ_REL) != 1) return;
            merge(item, parts, count);
        }
        for (int i = 0; i < count; i++) write(item, parts[i], i);
    }

    // Holes of the prefix: rows that the first query of the chunk or, as sinks, all see.
    void count_holes(const UnitRows& unit, const ExtendItem& item, int64_t recent) {
        const int64_t prefix = a.prefix_lens[item.request];
        int64_t sink = a.bounds.sink[a.unit0 + item.head], start = prefix - recent + 1;
        sink = sink < 0 ? 0 : sink > prefix ? prefix : sink;
        start = start < sink ? sink : start;
        const int64_t missing = unit.count_holes(0, sink) + unit.count_holes(start, prefix);
        if (missing) __atomic_fetch_add(&holes, missing, __ATOMIC_RELAXED);
    }

    // Sub-blocks of an item with their state in `memory`; returns how many.
    int lay_out(const ExtendItem& item, float* memory, SubBlock* parts) const {
        const int64_t lanes = int64_t(a.extend_lens[item.request]) * group, lane0 = int64_t(item.block) * BLOCK;
        const int64_t lane1 = lane0 + BLOCK < lanes ? lane0 + BLOCK : lanes, prefix = a.prefix_lens[item.request];
        int count = 0;
        for (int64_t lane = lane0; lane < lane1; lane += SUB, count++) {
            SubBlock& part = parts[count];
            part.lanes = int(lane1 - lane < SUB ? lane1 - lane : SUB);
            part.vectors = (part.lanes + W - 1) / W;
            part.first = prefix + lane / group;
            part.last = prefix + (lane + part.lanes - 1) / group;
            part.o = memory + count * state_floats();
            part.m = part.o + int64_t(d) * SUB;
            part.l = part.m + SUB;
        }
        return count;
    }

    // The (token, head) of a lane: the address of its row in a tensor [T, Hq, D].
    template <class P>
    P* row(const ExtendItem& item, int part, int i, P* base, int64_t token_stride, int64_t head_stride) const {
        const int64_t lane = int64_t(item.block) * BLOCK + part * SUB + i;
        return base + (item.token0 + lane / group) * token_stride + (item.head * group + lane % group) * head_stride;
    }

    void begin(const ExtendItem& item, SubBlock& part, int index) const {
        const int lanes = part.vectors * W;
        const int64_t lane0 = int64_t(item.block) * BLOCK + index * SUB, prefix = a.prefix_lens[item.request];
        for (int i = 0; i < lanes; i++) {
            const bool used = i < part.lanes;
            part.positions[i] = int32_t(used ? prefix + (lane0 + i) / group : part.last);
            part.m[i] = NOTHING_YET;
            part.l[i] = 0;
            const T* from = used ? row(item, index, i, (const T*)a.q, a.q_token_stride, a.q_head_stride) : nullptr;
            if (!used)
                for (int c = 0; c < depth; c++) part.q[c * lanes + i] = 0;
            else if (math.PAIRS)
                for (int c = 0; c < depth; c++) __builtin_memcpy(part.q + c * lanes + i, from + 2 * c, 4);
            else
                for (int c = 0; c < depth; c++) part.q[c * lanes + i] = to_float(from[c]);
        }
        for (int c = 0; c < d * lanes; c++) part.o[c] = 0;
    }

    void walk(const ExtendItem& item, const UnitRows& unit, int64_t from, int64_t to, int64_t recent, Tile& tile,
              SubBlock* parts, int count) const {
        for (int64_t start = from; start < to; start += KEYS) {
            tile.start = start;
            tile.end = start + KEYS < to ? start + KEYS : to;
            find_rows(item, unit, tile);
            if (tile.rows == 0) continue;
            math.pack(tile);
            for (int i = 0; i < count; i++) math.attend(parts[i], tile, recent);
        }
    }

    void find_rows(const ExtendItem& item, const UnitRows& unit, Tile& tile) const {
        const int64_t prefix = a.prefix_lens[item.request], middle = tile.end < prefix ? tile.end : prefix;
        int64_t missing = 0, rows = 0;
        if (tile.start < middle) {
            rows = unit.find(tile.start, middle, tile.key_rows, tile.positions, missing);
            const int64_t to_value = a.cache.page_rows * unit.row_bytes;
            for (int64_t i = 0; i < rows; i++) tile.value_rows[i] = tile.key_rows[i] + to_value;
        }
        for (int64_t j = tile.start > prefix ? tile.start : prefix; j < tile.end; j++, rows++) {
            const int64_t token = item.token0 + j - prefix;
            tile.key_rows[rows] = a.k + (token * a.k_token_stride + item.head * a.k_head_stride) * int64_t(sizeof(T));
            tile.value_rows[rows] = a.v + (token * a.v_token_stride + item.head * a.v_head_stride) * int64_t(sizeof(T));
            tile.positions[rows] = int32_t(j);
        }
        tile.rows = int(rows);
        tile.dense = missing == 0;
    }

    // The states of all segments of a block, in order, into `parts`: those of the first.
    void merge(const ExtendItem& item, SubBlock* parts, int count) const {
        SubBlock others[PARTS];
        lay_out(item, partials + item.first * PARTS * state_floats(), parts);
        for (int i = 0; i < count; i++) {
            V top[SUB_VECTORS], total[SUB_VECTORS];
            const int vectors = parts[i].vectors;
            for (int v = 0; v < vectors; v++) top[v] = load(parts[i].m + v * W);
            for (int s = 1; s < item.segments; s++) {
                lay_out(item, partials + (item.first + s) * PARTS * state_floats(), others);
                for (int v = 0; v < vectors; v++) top[v] = vmax(top[v], load(others[i].m + v * W));
            }
            for (int s = 0; s < item.segments; s++) {
                lay_out(item, partials + (item.first + s) * PARTS * state_floats(), others);
                for (int v = 0; v < vectors; v++) {
                    const V weight = exp2_<true>(sub(load(others[i].m + v * W), top[v]));
                    const V l = mul(weight, load(others[i].l + v * W));
                    total[v] = s == 0 ? l : add(total[v], l);
                    for (int c = 0; c < d; c++) {
                        float* to = parts[i].o + (c * vectors + v) * W;
                        const V x = mul(weight, load(others[i].o + (c * vectors + v) * W));
                        store(to, s == 0 ? x : add(load(to), x));
                    }
                }
            }
            for (int v = 0; v < vectors; v++) store(parts[i].l + v * W, total[v]);
        }
    }

    void write(const ExtendItem& item, const SubBlock& part, int index) const {
        const int lanes = part.vectors * W;
        for (int i = 0; i < part.lanes; i++) {
            const float inverse = part.l[i] == 0 ? 0 : 1 / part.l[i];
            T* to = row(item, index, i, (T*)a.out, a.out_token_stride, a.out_head_stride);
            for (int c = 0; c < d; c++) to[c] = from_float<T>(part.o[c * lanes + i] * inverse);
        }
    }
};

template <class T> static int64_t extend_as(const ExtendArgs& a) {
    const int d = int(a.cache.head_size), depth = Pairs<T>::value ? d / 2 : d, group = int(a.query_heads / a.kv_heads);
    Extend<T> work{a, {d, depth, a.scale, a.logit_cap}, nullptr, nullptr, nullptr, nullptr, 0, d, depth, group};
    int64_t most = 0, segmented = 0;
    for (int64_t b = 0; b < a.batch; b++) {
        const int64_t blocks = (int64_t(a.extend_lens[b]) * group + BLOCK - 1) / BLOCK;
        most += (blocks < SEGMENTS_MOST ? SEGMENTS_MOST : blocks) * a.kv_heads;
    }
    char* memory = (char*)scratch(0, most * (sizeof(ExtendItem) + sizeof(int64_t) + 2 * sizeof(int32_t)));
    ExtendItem* items = (ExtendItem*)memory;
    int64_t* cost = (int64_t*)(items + most);
    int32_t* order = (int32_t*)(cost + most);
    work.items = items;
    work.order = order;
    work.left = order + most;

    int32_t count = 0;
    int64_t token0 = 0;
    for (int32_t b = 0; b < a.batch; b++) {
        const int64_t lanes = int64_t(a.extend_lens[b]) * group, prefix = a.prefix_lens[b];
        const int64_t blocks = (lanes + BLOCK - 1) / BLOCK;
        for (int32_t h = 0; h < a.kv_heads; h++)
            for (int32_t block = 0; block < blocks; block++) {
                const int64_t lane0 = int64_t(block) * BLOCK, lane1 = lane0 + BLOCK < lanes ? lane0 + BLOCK : lanes;
                const int64_t end = prefix + (lane1 - 1) / group + 1;
                int64_t sink = a.bounds.sink[a.unit0 + h];
                int64_t start = prefix + lane0 / group - a.bounds.recent[a.unit0 + h] + 1;
                // Below `sink` no row needs a window, so where the two meet, the window begins after the sinks.
                sink = sink < 0 ? 0 : sink > end ? end : sink;
                start = start < sink ? sink : start > end ? end : start;
                const int64_t rows = sink + end - start;
                int64_t segments = blocks < SEGMENTS_MOST ? SEGMENTS_MOST / blocks : 1;
                if (segments > rows / SEGMENT_ROWS) segments = rows < SEGMENT_ROWS ? 1 : rows / SEGMENT_ROWS;
                const int64_t each = ((rows + segments - 1) / segments + KEYS - 1) / KEYS * KEYS;
                const int32_t first = count;
                for (int64_t from = 0; from < rows || count == first; from += each) {
                    const int64_t to = from + each < rows ? from + each : rows;
                    cost[count] = to - from;
                    items[count++] = {b, h, block, first, 0, token0, from, to, sink, start};
                }
                for (int32_t i = first; i < count; i++) items[i].segments = count - first;
                work.left[first] = count - first;
                if (count - first > 1) segmented = count;
            }
        token0 += a.extend_lens[b];
    }
    order_by_cost(cost, count, order);
    if (segmented) work.partials = (float*)scratch(2, segmented * work.PARTS * work.state_floats() * sizeof(float));
    parallel_items(a.threads, count, work);
    return work.holes;
}

static int64_t extend(const ExtendArgs& a) {
    switch (a.dtype) {
        case Dtype::float32: return extend_as<float>(a);
        case Dtype::bfloat16: return extend_as<bf16>(a);
        default: return extend_as<f16>(a);
    }
}
