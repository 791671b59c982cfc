// Attention of a few queries to a tile of keys, with an online softmax (FlashAttention, arXiv 2205.14135).
// Included inside `namespace kvir::<isa>`.
//
// Queries are *lanes*.  SUB lanes make a sub-block; everything of it is kept transposed, lanes innermost: logits
// [key][lane], output [d][lane].  So the softmax needs no horizontal operation, masks are per lane, and both products
// are
//
//     c[i][lane] += sum over k of a[i][k] * b[k][lane],  a broadcast, b and c vectors of lanes.
//
// Where bf16 dot products exist, two consecutive k are one 32-bit element.  Logits are in units of log 2.

constexpr int KEYS = 64;  // of a tile
constexpr int SUB_VECTORS = 3;
constexpr int SUB = SUB_VECTORS * W;
constexpr int ROWS = W == 16 ? 8 : 4;    // rows of c that a product keeps in registers
constexpr float NEVER = 1 << 20;         // beyond any position relative to a tile
constexpr float NOTHING_YET = -1e30f;    // the maximum of no logits; finite, so that differences are numbers

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
// The pragmas are worth 5 %.
template <int N, bool PAIRS, bool ADD>
static inline void product(const float* a, int64_t row, int64_t step, const float* b, int k, float* c,
                           const float* shrink) {
    V acc[ROWS][N];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 3
        for (int v = 0; v < N; v++)
            acc[i][v] = ADD ? mul(load(c + (i * N + v) * W), load(shrink + v * W)) : zero();
    }
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
    for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 3
        for (int v = 0; v < N; v++) store(c + (i * N + v) * W, acc[i][v]);
    }
}

// What one sub-block of lanes carries from tile to tile.
struct SubBlock {
    float* q;             // [depth][lanes]
    float* o;             // [d][lanes]
    float *m, *l;         // [lanes], maxima of the logits, sums of the weights
    int32_t* positions;   // [lanes]
    int64_t first, last;  // positions of the first and the last lane
    int lanes, vectors;   // in use; lanes that are not used sit at the last position
};

// A tile of rows at positions [start, end), without the holes among them, and memory for the work on it.
struct Tile {
    float* keys;                 // [KEYS][depth]
    float* values;               // [KEYS][d], or [KEYS / 2][d] pairs
    float* s;                    // [KEYS][lanes] logits, then weights
    float* p;                    // [KEYS / 2][lanes] pairs of weights
    float *shrink, *low, *high;  // [lanes]
    const char *key_rows[KEYS], *value_rows[KEYS];
    int32_t positions[KEYS];
    int rows;
    int64_t start, end;
    bool dense;     // no holes
    bool windowed;  // lanes see its rows through the window, not as sinks
};

template <class T> struct TileAttention {
    static constexpr bool PAIRS = Pairs<T>::value;
    static constexpr bool PRECISE = sizeof(T) == 4;
    int d, depth;  // depth: elements of a packed query or key row, d or d / 2
    float scale, cap;

    static int64_t tile_floats(int d, int depth) { return KEYS * (int64_t(depth) + d + 2 * SUB) + 3 * SUB; }
    void lay_out(Tile& tile, float* memory) const {
        tile.keys = memory;
        tile.values = tile.keys + int64_t(KEYS) * depth;
        tile.s = tile.values + int64_t(KEYS) * d;
        tile.p = tile.s + KEYS * SUB;
        tile.shrink = tile.p + KEYS * SUB;
        tile.low = tile.shrink + SUB;
        tile.high = tile.low + SUB;
    }

    // Packs key_rows and value_rows.  Keys past the last are zero, so that a product may read a whole block of them.
    void pack(Tile& tile) const {
        for (int j = 0; j < tile.rows; j++) widen(tile.keys + int64_t(j) * depth, (const T*)tile.key_rows[j]);
        for (int j = tile.rows; j % ROWS != 0; j++)
            __builtin_memset(tile.keys + int64_t(j) * depth, 0, depth * sizeof(float));
        if (!PAIRS) {
            for (int j = 0; j < tile.rows; j++) widen(tile.values + int64_t(j) * d, (const T*)tile.value_rows[j]);
            return;
        }
        for (int j = 0; j < tile.rows; j += 2) {
            const uint16_t* x = (const uint16_t*)tile.value_rows[j];
            uint32_t* to = (uint32_t*)(tile.values + int64_t(j / 2) * d);
            if (j + 1 < tile.rows) {
                const uint16_t* y = (const uint16_t*)tile.value_rows[j + 1];
                for (int c = 0; c < d; c++) to[c] = x[c] | uint32_t(y[c]) << 16;
            } else {
                for (int c = 0; c < d; c++) to[c] = x[c];
            }
        }
    }

    void widen(float* to, const T* from) const {
        if (PAIRS || sizeof(T) == 4) {
            __builtin_memcpy(to, from, d * sizeof(T));
            return;
        }
        int c = 0;
        for (; c + W <= d; c += W) store(to + c, load(from + c));
        for (; c < d; c++) to[c] = to_float(from[c]);
    }

    void attend(SubBlock& part, Tile& tile, int64_t recent) const {
        if (part.vectors == 3) attend_vectors<3>(part, tile, recent);
        if (part.vectors == 2) attend_vectors<2>(part, tile, recent);
        if (part.vectors == 1) attend_vectors<1>(part, tile, recent);
    }

    template <int N> void attend_vectors(SubBlock& part, Tile& tile, int64_t recent) const {
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
            product<N, PAIRS, false>(tile.keys + int64_t(j) * depth, depth, 1, part.q, depth, tile.s + j * N * W,
                                     nullptr);
        if (masked) limit(part, tile, recent);
        for (int v = 0; v < N; v++) softmax(part, tile, from, to, masked, v);
        const float* weights = PAIRS ? tile.p + from / 2 * N * W : tile.s + from * N * W;
        const float* values = tile.values + int64_t(PAIRS ? from / 2 : from) * d;
        const int k = PAIRS ? (to + 1) / 2 - from / 2 : to - from;
        for (int c = 0; c < d; c += ROWS)
            product<N, PAIRS, true>(values + c, 1, d, weights, k, part.o + c * N * W, tile.shrink);
    }

    // A lane sees the tile's rows at low < position - start <= high.
    void limit(const SubBlock& part, Tile& tile, int64_t recent) const {
        for (int i = 0; i < part.vectors * W; i++) {
            int64_t high = part.positions[i] - tile.start, low = tile.windowed ? high - recent : -1;
            tile.high[i] = high > int64_t(NEVER) ? NEVER : float(high);
            tile.low[i] = low < -1 ? -1.f : float(low);
        }
    }

    // Logits of vector v of the lanes become weights; m, l and shrink follow.
    void softmax(SubBlock& part, Tile& tile, int from, int to, bool masked, int v) const {
        constexpr float LOG2E = 1.44269504088896341f;
        const int stride = part.vectors * W;
        float* s = tile.s + v * W;
        V top = set1(-INFINITY);
        const V unit = set1(cap > 0 ? LOG2E : scale * LOG2E);
        if (cap > 0)
            for (int j = from; j < to; j++)
                store(s + j * stride, mul(tanh_(mul(load(s + j * stride), set1(scale / cap))), set1(cap)));
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
        alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        return (V)_mm512_permutexvar_epi16(_mm512_load_si512(order), (__m512i)_mm512_cvtne2ps_pbh(y, x));
#else
        return x;
#endif
    }
};
