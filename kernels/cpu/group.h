// Rows of one KV head against the query heads of its group: dot products with keys, sums of values.
// Included inside `namespace kvir::<isa>`.
//
// In templates D is the head size, or 0 where it is not known beforehand; N counts query heads that share a load.

constexpr int TILE = 16;                // rows at a time; a multiple of every W
constexpr int HEADS = W == 16 ? 4 : 2;  // query heads whose sums fit into registers at once
constexpr int64_t LINE = 64;            // bytes of a cache line

// How elements of T are multiplied: widened to float, unless the machine can do better.
template <class T> struct Dot {
    using E = float;  // of a query in memory
    using X = V;
    static constexpr int STEP = W;
    static inline E from(T x) { return to_float(x); }
    template <class P> static inline X get(const P* p) { return load(p); }
    template <class P> static inline X get_part(const P* p, int n) { return load_part(p, n); }
    static inline V multiply_add(X a, X b, V c) { return fma(a, b, c); }
};
#if defined(__AVX512BF16__)
template <> struct Dot<bf16> {
    using E = bf16;
    using X = __m512bh;
    static constexpr int STEP = 2 * W;
    static inline E from(bf16 x) { return x; }
    static inline X get(const bf16* p) { return (X)_mm512_loadu_si512(p); }
    static inline X get_part(const bf16* p, int n) { return (X)_mm512_maskz_loadu_epi16((1u << n) - 1, p); }
    static inline V multiply_add(X a, X b, V c) { return _mm512_dpbf16_ps(c, a, b); }
};
#endif

// How many rows before they are needed rows are prefetched: every line twice.  Measured, that is 10 to 30 % faster than
// once, as if prefetches were dropped when too many are under way.
struct Ahead {
    int far, near;
};

// The line at element c of a row, at both distances.  Rows are read once, so they are fetched past the outer caches:
// 10 to 20 % faster than into all of them.
template <class T> static inline void prefetch(const T* const* row, int64_t c, Ahead ahead) {
    __builtin_prefetch(row[ahead.far] + c, 0, 0);
    __builtin_prefetch(row[ahead.near] + c, 0, 0);
}
template <class T> static inline bool begins_line(int64_t c) { return c * int64_t(sizeof(T)) % LINE == 0; }

// logits[g][0 .. W) = q[g] . keys[0 .. W).  If FETCH, prefetches keys on the way, evenly: bursts are slow.
template <class T, int D, int N, bool FETCH>
static inline void dot_keys(const typename Dot<T>::E* q, const T* const* keys, int d, float* logits, Ahead ahead) {
    using M = Dot<T>;
    if (D) d = D;
    V quads[N][W / 4];
    for (int i = 0; i < W / 4; i++) {
        V acc[N][4];
        for (int g = 0; g < N; g++)
            for (int j = 0; j < 4; j++) acc[g][j] = zero();
        const T* const* row = keys + 4 * i;
        const T *k0 = row[0], *k1 = row[1], *k2 = row[2], *k3 = row[3];
        int c = 0;
        for (; c + M::STEP <= d; c += M::STEP) {
            if (FETCH && begins_line<T>(c))
                for (int j = 0; j < 4; j++) prefetch(row + j, c, ahead);
            typename M::X x[4] = {M::get(k0 + c), M::get(k1 + c), M::get(k2 + c), M::get(k3 + c)};
            for (int g = 0; g < N; g++) {
                typename M::X y = M::get(q + g * d + c);
                for (int j = 0; j < 4; j++) acc[g][j] = M::multiply_add(x[j], y, acc[g][j]);
            }
        }
        if (c < d) {
            int n = d - c;
            if (FETCH && begins_line<T>(c))
                for (int j = 0; j < 4; j++) prefetch(row + j, c, ahead);
            typename M::X x[4] = {M::get_part(k0 + c, n), M::get_part(k1 + c, n), M::get_part(k2 + c, n),
                                  M::get_part(k3 + c, n)};
            for (int g = 0; g < N; g++) {
                typename M::X y = M::get_part(q + g * d + c, n);
                for (int j = 0; j < 4; j++) acc[g][j] = M::multiply_add(x[j], y, acc[g][j]);
            }
        }
        for (int g = 0; g < N; g++) quads[g][i] = sums_of_4(acc[g]);
    }
    for (int g = 0; g < N; g++) store(logits + g * TILE, join_quads(quads[g]));
}

// Loads N vectors of values.  Pairs of vectors of bf16 come as the even and the odd elements of 2 W.
template <class T, int N> struct Values {
    static inline void get(const T* p, V* x) {
        for (int i = 0; i < N; i++) x[i] = load(p + i * W);
    }
};
template <int N> struct Values<bf16, N> {
    static inline void get(const bf16* p, V* x) {
        for (int i = 0; i + 1 < N; i += 2) split(p + i * W, x[i], x[i + 1]);
        if (N % 2) x[N - 1] = load(p + (N - 1) * W);
    }
};
// Where element c of a sum of values is, in the order that results.
template <class T> static inline int place(int c, int) { return c; }
template <> inline int place<bf16>(int c, int d) {
    const int block = c / (2 * W) * (2 * W);
    return block + 2 * W <= d ? block + c % 2 * W + (c - block) / 2 : c;
}

// o[g][c ...] += sum over `rows` rows of weights[g][row] * value[row][c ...], for N heads and M vectors.
template <class T, int N, int M, bool FETCH>
static inline void add_block(float* o, int d, const float* weights, const T* const* keys, int64_t to_value, int rows,
                             int c, Ahead ahead) {
    V acc[N][M];
    for (int g = 0; g < N; g++)
        for (int i = 0; i < M; i++) acc[g][i] = load(o + g * d + c + i * W);
    for (int t = 0; t < rows; t++) {
        V x[M];
        if (FETCH)
            for (int i = c; i < c + M * W; i += W)
                if (begins_line<T>(i)) prefetch(keys + t, to_value + i, ahead);
        Values<T, M>::get(keys[t] + to_value + c, x);
        for (int g = 0; g < N; g++) {
            V weight = set1(weights[g * TILE + t]);
            for (int i = 0; i < M; i++) acc[g][i] = fma(weight, x[i], acc[g][i]);
        }
    }
    for (int g = 0; g < N; g++)
        for (int i = 0; i < M; i++) store(o + g * d + c + i * W, acc[g][i]);
}

template <class T, int D, int N, bool FETCH>
static inline void add_values(float* o, int d, const float* weights, const T* const* keys, int64_t to_value, int rows,
                              Ahead ahead) {
    constexpr int M = W == 16 ? 4 : 2;
    if (D) d = D;
    int c = 0;
    for (; c + M * W <= d; c += M * W)
        add_block<T, N, M, FETCH>(o, d, weights, keys, to_value, rows, c, ahead);
    for (; M > 2 && c + 2 * W <= d; c += 2 * W)
        add_block<T, N, 2, FETCH>(o, d, weights, keys, to_value, rows, c, ahead);
    for (; c + W <= d; c += W) add_block<T, N, 1, FETCH>(o, d, weights, keys, to_value, rows, c, ahead);
    for (int g = 0; c < d && g < N; g++) {
        V acc = load_part(o + g * d + c, d - c);
        for (int t = 0; t < rows; t++)
            acc = fma(set1(weights[g * TILE + t]), load_part(keys[t] + to_value + c, d - c), acc);
        store_part(o + g * d + c, acc, d - c);
    }
}
