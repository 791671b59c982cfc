// Decode attention: one query per request.  Included inside `namespace kvir::<isa>`.
//
// The visible rows of a (request, KV head) are cut into chunks of CHUNK rows; chunks are the work items.  A chunk
// gives each query head of the group a partial softmax (maximum, sum, weighted values); whoever finishes the last
// chunk of a (request, KV head) merges them in order.  So a result depends on the request's own rows alone, neither
// on the threads nor on the rest of the batch.
//
// All logits are in units of log 2.

constexpr int CHUNK = 256;
constexpr int TILE = 32;  // rows whose logits are in flight at once; a multiple of every W
constexpr int LINE = 64;  // bytes of a cache line

static inline void prefetch(const char* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch(p + i, 0, 3);
}

// The query heads of one group, as the dot products want them.
template <class T> struct Query {
    using E = float;
    static constexpr bool NATIVE = sizeof(T) == 4;  // keys are read as they are, not widened first
    static inline E from(T x) { return to_float(x); }
};
#if defined(__AVX512BF16__)
template <> struct Query<bf16> {
    using E = bf16;
    static constexpr bool NATIVE = true;
    static inline E from(bf16 x) { return x; }
};
#endif

// Logits (unscaled) of W keys: lane i is q . keys[i].
template <int D> static inline V dot_keys(const float* q, const char* const* keys, int d) {
    V acc[W];
    if (D) d = D;
    for (int i = 0; i < W; i++) acc[i] = zero();
    int c = 0;
    for (; c + 4 * W <= d; c += 4 * W) {
        V q0 = load(q + c), q1 = load(q + c + W), q2 = load(q + c + 2 * W), q3 = load(q + c + 3 * W);
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) {
            const float* k = (const float*)keys[i] + c;
            acc[i] = fma(load(k), q0, acc[i]);
            acc[i] = fma(load(k + W), q1, acc[i]);
            acc[i] = fma(load(k + 2 * W), q2, acc[i]);
            acc[i] = fma(load(k + 3 * W), q3, acc[i]);
        }
    }
    for (; c + W <= d; c += W) {
        V q0 = load(q + c);
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) acc[i] = fma(load((const float*)keys[i] + c), q0, acc[i]);
    }
#if defined(__AVX512F__)
    if (c < d) {
        V q0 = load8(q + c);
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) acc[i] = fma(load8((const float*)keys[i] + c), q0, acc[i]);
    }
#endif
    return sums(acc);
}

#if defined(__AVX512BF16__)
static inline __m512bh pairs(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
template <int D> static inline V dot_keys(const bf16* q, const char* const* keys, int d) {
    V acc[W];
    if (D) d = D;
    for (int i = 0; i < W; i++) acc[i] = zero();
    int c = 0;
    for (; c + 64 <= d; c += 64) {
        __m512bh q0 = pairs(q + c), q1 = pairs(q + c + 32);
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) {
            const bf16* k = (const bf16*)keys[i] + c;
            acc[i] = _mm512_dpbf16_ps(acc[i], pairs(k), q0);
            acc[i] = _mm512_dpbf16_ps(acc[i], pairs(k + 32), q1);
        }
    }
    for (; c < d; c += 32) {
        __mmask32 part = d - c >= 32 ? ~__mmask32(0) : (__mmask32(1) << (d - c)) - 1;
        __m512bh q0 = (__m512bh)_mm512_maskz_loadu_epi16(part, q + c);
#pragma GCC unroll 16
        for (int i = 0; i < W; i++)
            acc[i] = _mm512_dpbf16_ps(acc[i], (__m512bh)_mm512_maskz_loadu_epi16(part, (const bf16*)keys[i] + c), q0);
    }
    return sums(acc);
}
#endif

// o[g][c .. c + N * W) += sum over rows of p[g][row] * value[row], N vectors of GB heads at a time.
template <class T, int GB, int N, bool PART>
static inline void add_values_block(float* o, int64_t d, const float* p, const char* const* keys, int64_t to_value,
                                    int rows, int c) {
    V acc[GB][N];
#if defined(__AVX512F__)
#define LOAD_PART(x) (PART ? load8(x) : load(x))
#define STORE_PART(x, y) (PART ? store8(x, y) : store(x, y))
#else
#define LOAD_PART(x) load(x)
#define STORE_PART(x, y) store(x, y)
#endif
    for (int g = 0; g < GB; g++)
        for (int n = 0; n < N; n++) acc[g][n] = LOAD_PART(o + g * d + c + n * W);
    for (int t = 0; t < rows; t++) {
        const T* value = (const T*)(keys[t] + to_value) + c;
        V x[N];
        for (int n = 0; n < N; n++) x[n] = LOAD_PART(value + n * W);
        for (int g = 0; g < GB; g++) {
            V weight = set1(p[g * TILE + t]);
            for (int n = 0; n < N; n++) acc[g][n] = fma(weight, x[n], acc[g][n]);
        }
    }
    for (int g = 0; g < GB; g++)
        for (int n = 0; n < N; n++) STORE_PART(o + g * d + c + n * W, acc[g][n]);
#undef LOAD_PART
#undef STORE_PART
}

template <class T, int D, int GB>
static inline void add_values(float* o, int d, const float* p, const char* const* keys, int64_t to_value, int rows) {
    constexpr int N = W == 16 ? 4 : 2;
    if (D) d = D;
    int c = 0;
    for (; c + N * W <= d; c += N * W) add_values_block<T, GB, N, false>(o, d, p, keys, to_value, rows, c);
    for (; c + W <= d; c += W) add_values_block<T, GB, 1, false>(o, d, p, keys, to_value, rows, c);
    if (c < d) add_values_block<T, GB, 1, true>(o, d, p, keys, to_value, rows, c);
}

// Turns TILE logits of one head, `rows` of them real, into weights, and rescales what was summed before.
template <bool PRECISE>
static inline void softmax_tile(float* s, int rows, float scale, float cap, float& m, float& l, float* o, int d) {
    constexpr float LOG2E = 1.44269504088896341f;
    V x[TILE / W], top = set1(-INFINITY);
    for (int i = 0; i < TILE / W; i++) {
        x[i] = load(s + i * W);
        if (cap > 0)
            x[i] = mul(tanh_(mul(x[i], set1(scale / cap))), set1(cap * LOG2E));
        else
            x[i] = mul(x[i], set1(scale * LOG2E));
        x[i] = rows - i * W > 0 ? keep_first(x[i], rows - i * W) : set1(-INFINITY);
        top = vmax(top, x[i]);
    }
    float m2 = max_lane(top);
    if (m2 > m) {
        if (l > 0) {
            float shrink = __builtin_exp2f(m - m2);
            l *= shrink;
            for (int c = 0; c < d; c++) o[c] *= shrink;
        }
        m = m2;
    }
    V total = zero();
    for (int i = 0; i < TILE / W; i++) {
        x[i] = exp2_<PRECISE>(sub(x[i], set1(m)));
        total = add(total, x[i]);
        store(s + i * W, x[i]);
    }
    l += sum(total);
}

struct DecodeItem {
    int32_t request, head, chunk, unit_item;  // unit_item: first item of the same (request, KV head)
    int32_t chunks;                           // of the same (request, KV head)
    int32_t sink_rows, window_start, visible_rows;
};

template <class T, int D> struct Decode {
    const DecodeArgs& a;
    const DecodeItem* items;
    float* partials;             // per item: [G][d] values, then [G] maxima, [G] sums
    int32_t* left;              // at an item that is the first of its unit: chunks not finished
    int64_t holes;
    int d, group;

    int64_t partial_floats() const { return int64_t(group) * (d + 2); }

    void operator()(int64_t index) {
        const DecodeItem& item = items[index];
        chunk(item, partials + index * partial_floats());
        if (__atomic_fetch_sub(&left[item.unit_item], 1, __ATOMIC_ACQ_REL) == 1) merge(item);
    }

    // Rows [v0, v1) of the visible rows: first the sinks, then the window.
    void chunk(const DecodeItem& item, float* o) {
        const char* keys[CHUNK + TILE];
        int64_t v0 = int64_t(item.chunk) * CHUNK, v1 = v0 + CHUNK, missing = 0, rows = 0;
        if (v1 > item.visible_rows) v1 = item.visible_rows;
        UnitRows unit(a.cache, a.pages, item.request, a.unit0 + item.head, sizeof(T));
        int64_t shift = item.window_start - item.sink_rows;
        if (v0 < item.sink_rows)
            rows += unit.find(v0, v1 < item.sink_rows ? v1 : item.sink_rows, keys, nullptr, missing);
        if (v1 > item.sink_rows)
            rows += unit.find((v0 > item.sink_rows ? v0 : item.sink_rows) + shift, v1 + shift, keys + rows, nullptr,
                              missing);
        if (missing) __atomic_fetch_add(&holes, missing, __ATOMIC_RELAXED);

        using Q = Query<T>;
        using E = typename Q::E;
        int64_t floats = int64_t(group) * (d + TILE) + W * d;
        float* s = (float*)scratch(1, floats * sizeof(float));  // [group][TILE]
        E* q = (E*)(s + group * TILE);                           // [group][d]
        float* wide = s + int64_t(group) * (d + TILE);           // [W][d]
        float *m = o + int64_t(group) * d, *l = m + group;
        for (int g = 0; g < group; g++) {
            const T* from = (const T*)a.q + item.request * a.q_batch_stride + (item.head * group + g) * a.q_head_stride;
            for (int c = 0; c < d; c++) q[g * d + c] = Q::from(from[c]);
            for (int c = 0; c < d; c++) o[g * d + c] = 0;
            m[g] = -INFINITY;
            l[g] = 0;
        }
        if (rows == 0) return;
        for (int i = 0; i < TILE; i++) keys[rows + i] = keys[rows - 1];

        const int64_t to_value = a.cache.page_rows * unit.row_bytes;
        for (int i = 0; i < TILE && i < rows; i++) prefetch(keys[i], unit.row_bytes);
        for (int i = 0; i < TILE && i < rows; i++) prefetch(keys[i] + to_value, unit.row_bytes);
        for (int64_t t = 0; t < rows; t += TILE) {
            const char* const* key = keys + t;
            int n = rows - t < TILE ? int(rows - t) : TILE;
            int ahead = rows - t > TILE ? TILE : 0;
            for (int i = 0; i < n; i += W) {
                if (ahead)
                    for (int j = 0; j < W; j++) prefetch(key[TILE + i + j], unit.row_bytes);
                if (Q::NATIVE) {
                    for (int g = 0; g < group; g++) store(s + g * TILE + i, dot_keys<D>(q + g * d, key + i, d));
                } else {
                    widen(wide, key + i);
                    const char* rows_[W];
                    for (int j = 0; j < W; j++) rows_[j] = (const char*)(wide + j * d);
                    for (int g = 0; g < group; g++)
                        store(s + g * TILE + i, dot_keys<D>((const float*)(q + g * d), rows_, d));
                }
            }
            for (int g = 0; g < group; g++)
                softmax_tile<sizeof(T) == 4>(s + g * TILE, n, a.scale, a.logit_cap, m[g], l[g], o + g * d, d);
            if (ahead)
                for (int j = 0; j < TILE; j++) prefetch(key[TILE + j] + to_value, unit.row_bytes);
            int g = 0;
            for (; g + 4 <= group; g += 4) add_values<T, D, 4>(o + g * d, d, s + g * TILE, key, to_value, n);
            if (group - g == 3) add_values<T, D, 3>(o + g * d, d, s + g * TILE, key, to_value, n);
            if (group - g == 2) add_values<T, D, 2>(o + g * d, d, s + g * TILE, key, to_value, n);
            if (group - g == 1) add_values<T, D, 1>(o + g * d, d, s + g * TILE, key, to_value, n);
        }
    }

    void widen(float* to, const char* const* keys) {
        for (int j = 0; j < W; j++) {
            const T* from = (const T*)keys[j];
            int c = 0;
            for (; c + W <= d; c += W) store(to + j * d + c, load(from + c));
            for (; c < d; c++) to[j * d + c] = to_float(from[c]);
        }
    }

    void merge(const DecodeItem& item) {
        float* first = partials + item.unit_item * partial_floats();
        for (int g = 0; g < group; g++) {
            float top = -INFINITY, total = 0;
            float* o = first + int64_t(g) * d;
            for (int i = 0; i < item.chunks; i++) {
                float* part = first + i * partial_floats() + int64_t(group) * d;
                top = part[g] > top ? part[g] : top;
            }
            for (int i = 0; i < item.chunks; i++) {
                float* part = first + i * partial_floats();
                float l = part[int64_t(group) * d + group + g];
                // A chunk without rows has nothing to add; NaN must get through.
                if (l == 0) continue;
                float weight = __builtin_exp2f(part[int64_t(group) * d + g] - top);
                total += weight * l;
                if (i == 0)
                    for (int c = 0; c < d; c++) o[c] *= weight;
                else
                    for (int c = 0; c < d; c++) o[c] += weight * part[int64_t(g) * d + c];
            }
            float inverse = total == 0 ? 0 : 1 / total;
            T* out = (T*)a.out + item.request * a.out_batch_stride + (item.head * group + g) * a.out_head_stride;
            for (int c = 0; c < d; c++) out[c] = from_float<T>(o[c] * inverse);
        }
    }
};

template <class T, int D> static int64_t decode_as(const DecodeArgs& a) {
    const int d = int(a.cache.head_size), group = int(a.query_heads / a.kv_heads);
    int64_t most = 0, visible_bytes = 0;
    for (int64_t b = 0; b < a.batch; b++) most += (a.lens[b] > 0 ? a.lens[b] : 0) / CHUNK + 1;
    most *= a.kv_heads;
    const int64_t part = int64_t(group) * (d + 2) * sizeof(float);
    char* memory = (char*)scratch(0, most * (part + sizeof(DecodeItem) + sizeof(int32_t)));
    Decode<T, D> work{a, (DecodeItem*)(memory + most * part), (float*)memory,
                      (int32_t*)(memory + most * (part + sizeof(DecodeItem))), 0, d, group};

    int32_t count = 0;
    DecodeItem* items = (DecodeItem*)work.items;
    for (int32_t b = 0; b < a.batch; b++)
        for (int32_t h = 0; h < a.kv_heads; h++) {
            const int64_t n = a.lens[b] > 0 ? a.lens[b] : 0;
            int64_t sink = a.bounds.sink[a.unit0 + h], start = n - a.bounds.recent[a.unit0 + h];
            if (start < 0) start = 0;
            if (start > n) start = n;
            if (sink < 0) sink = 0;
            if (sink > start) sink = start;  // sinks and window meet
            const int64_t rows = sink + n - start, chunks = rows > CHUNK ? (rows + CHUNK - 1) / CHUNK : 1;
            work.left[count] = int32_t(chunks);
            visible_bytes += rows * 2 * d * int64_t(sizeof(T));
            for (int32_t c = 0, first = count; c < chunks; c++)
                items[count++] = {b, h, c, first, int32_t(chunks), int32_t(sink), int32_t(start), int32_t(rows)};
        }
    // A thread is woken for no less than 32 KiB.
    int64_t useful = visible_bytes / 32768 + 1;
    parallel_items(a.threads < useful ? a.threads : int(useful), count, work);
    return work.holes;
}

template <class T> static int64_t decode_of(const DecodeArgs& a) {
    switch (a.cache.head_size) {
        case 64: return decode_as<T, 64>(a);
        case 80: return decode_as<T, 80>(a);
        case 96: return decode_as<T, 96>(a);
        case 128: return decode_as<T, 128>(a);
        case 256: return decode_as<T, 256>(a);
        default: return decode_as<T, 0>(a);
    }
}

static int64_t decode(const DecodeArgs& a) {
    switch (a.dtype) {
        case Dtype::float32: return decode_of<float>(a);
        case Dtype::bfloat16: return decode_of<bf16>(a);
        default: return decode_of<f16>(a);
    }
}
