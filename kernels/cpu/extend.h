// Prefill attention: a chunk of queries per request, blocked, with an online softmax (FlashAttention, arXiv 2205.14135).
// Included inside `namespace kvir::<isa>`.
//
// The (token, query head of the group) pairs of one request and KV head are laid out token by token as *lanes*.  A work
// item is a block of BLOCK lanes; it walks over tiles of KEYS keys, packs each tile once and uses it for sub-blocks of
// SUB lanes.  Everything of a sub-block is kept transposed, lanes innermost: logits [key][lane], output [d][lane].  So
// the softmax needs no horizontal operation, masks are per lane, and both products are
//
//     c[i][lane] += sum over k of a[i][k] * b[k][lane],  a broadcast, b and c vectors of lanes.
//
// Tiles that no lane of a sub-block sees are skipped.  Where bf16 dot products exist, two consecutive k are one 32-bit
// element.  Logits are exponentiated base 2.

constexpr int KEYS = 64;
constexpr int SUB_VECTORS = 3;
constexpr int SUB = SUB_VECTORS * W;
constexpr int BLOCK = 192;               // a multiple of every SUB
constexpr int ROWS = W == 16 ? 8 : 4;    // rows of c that a product keeps in registers
constexpr float NEVER = 1 << 20;         // beyond any position relative to a tile

template <class T> struct Pairs { static constexpr bool value = false; };
#if defined(__AVX512BF16__)
template <> struct Pairs<bf16> { static constexpr bool value = true; };
#endif

template <bool PAIRS> static inline V multiply_add(V a, V b, V c) {
#if defined(__AVX512BF16__)
    if (PAIRS) return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
#endif
    return fma(a, b, c);
}

// c[ROWS][N] = a b, or c * shrink + a b.  a[i][k] is at a + i * row + k * step, b[k] at b + k * N * W.
template <int N, bool PAIRS, bool ADD>
static inline void product(const float* a, int64_t row, int64_t step, const float* b, int k, float* c,
                           const float* shrink) {
    V acc[ROWS][N];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 3
        for (int v = 0; v < N; v++)
            acc[i][v] = ADD ? mul(load(c + (i * N + v) * W), load(shrink + v * W)) : zero();
    for (int j = 0; j < k; j++, a += step, b += N * W) {
        V x[N];
#pragma GCC unroll 3
        for (int v = 0; v < N; v++) x[v] = load(b + v * W);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
            V y = set1(a[i * row]);
#pragma GCC unroll 3
            for (int v = 0; v < N; v++) acc[i][v] = multiply_add<PAIRS>(y, x[v], acc[i][v]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 3
        for (int v = 0; v < N; v++) store(c + (i * N + v) * W, acc[i][v]);
}

struct ExtendItem {
    int32_t request, head, block;
    int64_t token0;  // first token of the request in q
};

// What one sub-block of lanes carries from tile to tile.
struct SubBlock {
    float* q;         // [d or d / 2][lanes]
    float* o;         // [d][lanes]
    float *m, *l;     // [lanes], maxima of the logits in units of log 2, sums
    int lanes;        // in use
    int vectors;      // of lanes
    int64_t first, last;  // positions of the first and the last lane
    int32_t* positions;   // [lanes]
};

template <class T> struct Extend {
    static constexpr bool PAIRS = Pairs<T>::value;
    static constexpr bool PRECISE = sizeof(T) == 4;
    const ExtendArgs& a;
    const ExtendItem* items;
    const int32_t* order;
    int64_t holes;
    int d, depth, group;  // depth: elements of a packed query or key row, d or d / 2

    // Memory of one thread.
    struct Tile {
        float* keys;      // [KEYS][depth]
        float* values;    // [KEYS][d], or [KEYS / 2][d] pairs
        float* s;         // [KEYS][lanes] logits, then weights
        float* p;         // [KEYS / 2][lanes] pairs of weights
        float *shrink, *low, *high;  // [lanes]
        const char *key_rows[KEYS], *value_rows[KEYS];
        int32_t positions[KEYS];
        int rows;
        int64_t start;    // positions are start .. end - 1 if there are no holes
        int64_t end;
        bool dense;       // no holes
        bool windowed;    // lanes see its rows through the window, not as sinks
    };

    void operator()(int64_t index, int64_t) {
        const ExtendItem& item = items[order[index]];
        const int64_t unit_index = a.unit0 + item.head;
        const int64_t prefix = a.prefix_lens[item.request], extend = a.extend_lens[item.request];
        const int64_t lane0 = int64_t(item.block) * BLOCK;
        const int64_t lane1 = lane0 + BLOCK < extend * group ? lane0 + BLOCK : extend * group;
        const int64_t first = prefix + lane0 / group, last = prefix + (lane1 - 1) / group;
        const int64_t recent = a.bounds.recent[unit_index];
        UnitRows unit(a.cache, a.pages, item.request, unit_index, sizeof(T));

        // Positions below `sink` are seen by every later lane, positions from `start` on through the window.
        int64_t sink = a.bounds.sink[unit_index], start = first - recent + 1;
        if (start < 0) start = 0;
        if (start > last + 1) start = last + 1;
        if (sink < 0) sink = 0;
        if (sink > last + 1) sink = last + 1;
        if (item.block == 0) count_holes(unit, prefix, sink, recent);

        float* memory = (float*)scratch(
            1, int64_t(sizeof(float)) * (BLOCK * (int64_t(depth) + d + 3) + KEYS * (int64_t(depth) + d + SUB * 2) + SUB * 3));
        SubBlock parts[BLOCK / SUB];
        int part_count = 0;
        for (int64_t lane = lane0; lane < lane1; lane += SUB, part_count++) {
            SubBlock& part = parts[part_count];
            part.lanes = int(lane1 - lane < SUB ? lane1 - lane : SUB);
            part.vectors = (part.lanes + W - 1) / W;
            part.first = prefix + lane / group;
            part.last = prefix + (lane + part.lanes - 1) / group;
            part.q = memory;
            part.o = part.q + int64_t(depth) * SUB;
            part.m = part.o + int64_t(d) * SUB;
            part.l = part.m + SUB;
            part.positions = (int32_t*)(part.l + SUB);
            memory = part.l + 2 * SUB;
            pack_queries(item, part, lane);
        }
        Tile tile;
        tile.keys = memory;
        tile.values = tile.keys + int64_t(KEYS) * depth;
        tile.s = tile.values + int64_t(KEYS) * d;
        tile.p = tile.s + KEYS * SUB;
        tile.shrink = tile.p + KEYS * SUB;
        tile.low = tile.shrink + SUB;
        tile.high = tile.low + SUB;

        // Where sinks and window meet they are one range, in which a row below `sink` needs no window.
        tile.windowed = false;
        walk(item, unit, prefix, 0, sink, recent, tile, parts, part_count);
        tile.windowed = true;
        walk(item, unit, prefix, sink > start ? sink : start, last + 1, recent, tile, parts, part_count);

        for (int i = 0; i < part_count; i++) write(item, parts[i], lane0 + int64_t(i) * SUB);
    }

    void count_holes(const UnitRows& unit, int64_t prefix, int64_t sink, int64_t recent) {
        int64_t start = prefix - recent + 1;
        if (start < 0) start = 0;
        if (sink > prefix) sink = prefix;
        int64_t missing = unit.count_holes(0, sink) + unit.count_holes(sink > start ? sink : start, prefix);
        if (missing) __atomic_fetch_add(&holes, missing, __ATOMIC_RELAXED);
    }

    void walk(const ExtendItem& item, const UnitRows& unit, int64_t prefix, int64_t from, int64_t to, int64_t recent,
              Tile& tile, SubBlock* parts, int part_count) {
        for (int64_t start = from; start < to; start += KEYS) {
            tile.start = start;
            tile.end = start + KEYS < to ? start + KEYS : to;
            find_rows(item, unit, prefix, tile);
            if (tile.rows == 0) continue;
            pack_keys(tile);
            pack_values(tile);
            for (int i = 0; i < part_count; i++) {
                if (parts[i].vectors == 3) attend<3>(parts[i], tile, recent);
                if (parts[i].vectors == 2) attend<2>(parts[i], tile, recent);
                if (parts[i].vectors == 1) attend<1>(parts[i], tile, recent);
            }
        }
    }

    void find_rows(const ExtendItem& item, const UnitRows& unit, int64_t prefix, Tile& tile) {
        int64_t middle = tile.end < prefix ? tile.end : prefix, missing = 0, rows = 0;
        if (tile.start < middle) {
            rows = unit.find(tile.start, middle, tile.key_rows, tile.positions, missing);
            for (int64_t i = 0; i < rows; i++)
                tile.value_rows[i] = tile.key_rows[i] + a.cache.page_rows * unit.row_bytes;
        }
        for (int64_t j = tile.start > prefix ? tile.start : prefix; j < tile.end; j++, rows++) {
            int64_t token = item.token0 + j - prefix;
            tile.key_rows[rows] = a.k + (token * a.k_token_stride + item.head * a.k_head_stride) * sizeof(T);
            tile.value_rows[rows] = a.v + (token * a.v_token_stride + item.head * a.v_head_stride) * sizeof(T);
            tile.positions[rows] = int32_t(j);
        }
        tile.rows = int(rows);
        tile.dense = missing == 0;
    }

    static inline int round_up(int x, int to) { return (x + to - 1) / to * to; }

    // Rows past the last are zero, so that a product may read a whole block of them.
    void pack_keys(Tile& tile) {
        for (int j = 0; j < tile.rows; j++) widen(tile.keys + int64_t(j) * depth, (const T*)tile.key_rows[j]);
        for (int j = tile.rows; j < round_up(tile.rows, ROWS); j++)
            __builtin_memset(tile.keys + int64_t(j) * depth, 0, depth * sizeof(float));
    }

    void widen(float* to, const T* from) {
        if (PAIRS || sizeof(T) == 4) {
            __builtin_memcpy(to, from, d * sizeof(T));
            return;
        }
        int c = 0;
        for (; c + W <= d; c += W) store(to + c, load(from + c));
        for (; c < d; c++) to[c] = to_float(from[c]);
    }

    void pack_values(Tile& tile) {
        if (!PAIRS) {
            for (int j = 0; j < tile.rows; j++) widen(tile.values + int64_t(j) * d, (const T*)tile.value_rows[j]);
            return;
        }
        for (int j = 0; j < tile.rows; j += 2) {
            const uint16_t* x = (const uint16_t*)tile.value_rows[j];
            const uint16_t* y = j + 1 < tile.rows ? (const uint16_t*)tile.value_rows[j + 1] : nullptr;
            uint32_t* to = (uint32_t*)(tile.values + int64_t(j / 2) * d);
            if (y)
                for (int c = 0; c < d; c++) to[c] = x[c] | uint32_t(y[c]) << 16;
            else
                for (int c = 0; c < d; c++) to[c] = x[c];
        }
    }

    void pack_queries(const ExtendItem& item, SubBlock& part, int64_t lane0) {
        const int lanes = part.vectors * W;
        for (int i = 0; i < lanes; i++) {
            part.positions[i] = int32_t(i < part.lanes ? part.first + ((lane0 + i) / group - lane0 / group) : part.last);
            part.m[i] = -1e30f;
            part.l[i] = 0;
            if (i >= part.lanes) {
                for (int c = 0; c < depth; c++) part.q[c * lanes + i] = 0;
                continue;
            }
            const T* from = (const T*)a.q + (item.token0 + (lane0 + i) / group) * a.q_token_stride +
                            (item.head * group + (lane0 + i) % group) * a.q_head_stride;
            if (PAIRS)
                for (int c = 0; c < depth; c++) __builtin_memcpy(part.q + c * lanes + i, from + 2 * c, 4);
            else
                for (int c = 0; c < depth; c++) part.q[c * lanes + i] = to_float(from[c]);
        }
        for (int c = 0; c < d * lanes; c++) part.o[c] = 0;
    }

    void write(const ExtendItem& item, const SubBlock& part, int64_t lane0) {
        const int lanes = part.vectors * W;
        for (int i = 0; i < part.lanes; i++) {
            float inverse = part.l[i] == 0 ? 0 : 1 / part.l[i];
            T* to = (T*)a.out + (item.token0 + (lane0 + i) / group) * a.out_token_stride +
                    (item.head * group + (lane0 + i) % group) * a.out_head_stride;
            for (int c = 0; c < d; c++) to[c] = from_float<T>(part.o[c * lanes + i] * inverse);
        }
    }

    template <int N> void attend(SubBlock& part, Tile& tile, int64_t recent) {
        // Rows [from, to) of the tile are seen by some lane; all by all lanes, unless masked.
        int from = 0, to = tile.rows;
        if (tile.start > part.last) return;
        if (part.last + 1 - tile.start < to) to = int(part.last + 1 - tile.start);
        bool masked = tile.end - 1 > part.first;
        if (tile.windowed) {
            int64_t oldest = part.first - recent + 1;
            if (tile.end <= oldest) return;
            if (tile.dense && oldest > tile.start) from = int(oldest - tile.start) / ROWS * ROWS;
            masked |= tile.start <= part.last - recent;
        }

        for (int j = from; j < to; j += ROWS)
            product<N, PAIRS, false>(tile.keys + int64_t(j) * depth, depth, 1, part.q, depth, tile.s + j * N * W, nullptr);
        if (masked) mask_limits(part, tile, recent, N * W);
        for (int v = 0; v < N; v++) softmax(part, tile, from, to, masked, v, N);
        const float* weights = PAIRS ? tile.p + from / 2 * N * W : tile.s + from * N * W;
        const float* values = tile.values + int64_t(PAIRS ? from / 2 : from) * d;
        const int k = PAIRS ? (to + 1) / 2 - from / 2 : to - from;
        for (int c = 0; c < d; c += ROWS)
            product<N, PAIRS, true>(values + c, 1, d, weights, k, part.o + c * N * W, tile.shrink);
    }

    // A lane sees the tile's rows at low < position - start <= high.
    void mask_limits(const SubBlock& part, Tile& tile, int64_t recent, int lanes) {
        for (int i = 0; i < lanes; i++) {
            int64_t high = part.positions[i] - tile.start, low = tile.windowed ? high - recent : -1;
            tile.high[i] = high > int64_t(NEVER) ? NEVER : float(high);
            tile.low[i] = low < -1 ? -1.f : float(low);
        }
    }

    // Logits of vector v of the lanes become weights; m, l and shrink follow.
    void softmax(SubBlock& part, Tile& tile, int from, int to, bool masked, int v, int vectors) {
        constexpr float LOG2E = 1.44269504088896341f;
        const int stride = vectors * W;
        float* s = tile.s + v * W;
        V top = set1(-INFINITY);
        const V unit = set1(a.logit_cap > 0 ? LOG2E : a.scale * LOG2E);
        if (a.logit_cap > 0) {
            V inner = set1(a.scale / a.logit_cap), cap = set1(a.logit_cap);
            for (int j = from; j < to; j++) store(s + j * stride, mul(tanh_(mul(load(s + j * stride), inner)), cap));
        }
        if (masked) {
            V low = load(tile.low + v * W), high = load(tile.high + v * W);
            for (int j = from; j < to; j++) {
                V position = set1(float(tile.positions[j] - tile.start));
                V x = keep_between(load(s + j * stride), low, position, high);
                store(s + j * stride, x);
                top = vmax(top, x);
            }
        } else {
            for (int j = from; j < to; j++) top = vmax(top, load(s + j * stride));
        }
        const V old = load(part.m + v * W), base = vmax(old, mul(top, unit)), minus = sub(zero(), base);
        const V shrink = exp2_<true>(sub(old, base));
        V total = mul(load(part.l + v * W), shrink);
        if (PAIRS) {
            for (int j = from; j < to; j += 2) {
                V x = exp2_<PRECISE>(fma(load(s + j * stride), unit, minus));
                V y = j + 1 < to ? exp2_<PRECISE>(fma(load(s + (j + 1) * stride), unit, minus)) : zero();
                total = add(total, add(x, y));
                store(tile.p + j / 2 * stride + v * W, interleave(x, y));
            }
        } else {
            for (int j = from; j < to; j++) {
                V x = exp2_<PRECISE>(fma(load(s + j * stride), unit, minus));
                total = add(total, x);
                store(s + j * stride, x);
            }
        }
        store(part.m + v * W, base);
        store(part.l + v * W, total);
        store(tile.shrink + v * W, shrink);
    }

    // x and y rounded to bf16, lane i of x below lane i of y.
    static inline V interleave(V x, V y) {
#if defined(__AVX512BF16__)
        const __m512i order = _mm512_set_epi16(
            31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        return (V)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(y, x));
#else
        return x;
#endif
    }
};

template <class T> static int64_t extend_as(const ExtendArgs& a) {
    const int d = int(a.cache.head_size), group = int(a.query_heads / a.kv_heads);
    int64_t most = 0;
    for (int64_t b = 0; b < a.batch; b++) most += (int64_t(a.extend_lens[b]) * group + BLOCK - 1) / BLOCK * a.kv_heads;
    char* memory = (char*)scratch(0, most * (sizeof(ExtendItem) + sizeof(int64_t) + sizeof(int32_t)));
    ExtendItem* items = (ExtendItem*)memory;
    int64_t* cost = (int64_t*)(items + most);
    int32_t* order = (int32_t*)(cost + most);
    int64_t count = 0, token0 = 0;
    for (int32_t b = 0; b < a.batch; b++) {
        const int64_t lanes = int64_t(a.extend_lens[b]) * group;
        for (int32_t h = 0; h < a.kv_heads; h++)
            for (int64_t lane = 0; lane < lanes; lane += BLOCK) {
                const int64_t position = a.prefix_lens[b] + lane / group, sink = a.bounds.sink[a.unit0 + h];
                const int64_t recent = a.bounds.recent[a.unit0 + h];
                cost[count] = position < sink + recent ? position : sink + recent;
                items[count++] = {b, h, int32_t(lane / BLOCK), token0};
            }
        token0 += a.extend_lens[b];
    }
    order_by_cost(cost, count, order);
    Extend<T> work{a, items, order, 0, d, Pairs<T>::value ? d / 2 : d, group};
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
