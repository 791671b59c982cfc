// Decode attention: one query per request.  Included inside `namespace kvir::<isa>`.
//
// The visible rows of a (request, KV head) are cut into chunks of CHUNK rows; chunks are the work items.  A chunk
// gives each query head of the group a partial softmax (reference logit, sum, weighted values); whoever finishes the
// last chunk of a (request, KV head) merges them in order.  So a result depends on the request's own rows alone,
// neither on the threads nor on the rest of the batch.
//
// Logits are in units of log 2.  The reference logit of a chunk is not its maximum: it moves only when a logit exceeds
// it by more than SLACK, which after the first rows hardly happens, and the sums stay far from overflow.

constexpr int CHUNK = 256;  // rows of a chunk, about
constexpr int CHUNK_MOST = CHUNK * 3 / 2 + TILE;
constexpr int FAR_BYTES = 12288, NEAR_BYTES = 4096;  // of keys and values between prefetch and use, about
constexpr int AHEAD_MOST = 4 * TILE;
constexpr float SLACK = 16;

struct DecodeItem {
    int32_t request, head;
    int32_t from, to;       // of its visible rows: first the sinks, then the window
    int32_t first, chunks;  // of the same (request, KV head): its first item, how many
    int32_t sink_rows, window_start;
};

// One head's progress through a chunk.
struct Softmax {
    float reference, scale, cap;

    // Logits of a tile, `rows` of them real, become weights; `sums` [W] and o [d] follow.  `bias` [TILE] or null.
    template <bool PRECISE> inline void tile(float* s, int rows, const float* bias, float* sums, float* o, int d) {
        constexpr float LOG2E = 1.44269504088896341f;
        V x[TILE / W], top = set1(-INFINITY);
        for (int i = 0; i < TILE / W; i++) {
            x[i] = load(s + i * W);
            if (cap > 0)
                x[i] = mul(tanh_(mul(x[i], set1(scale / cap))), set1(cap * LOG2E));
            else
                x[i] = mul(x[i], set1(scale * LOG2E));
            if (bias) x[i] = fma(load(bias + i * W), set1(LOG2E), x[i]);
            if (rows < TILE) x[i] = rows > i * W ? keep_first(x[i], rows - i * W) : set1(-INFINITY);
            top = vmax(top, x[i]);
        }
        if (any_above(top, set1(reference + SLACK))) raise(max_lane(top), sums, o, d);
        V total = load(sums);
        for (int i = 0; i < TILE / W; i++) {
            x[i] = exp2_<PRECISE>(sub(x[i], set1(reference)));
            total = add(total, x[i]);
            store(s + i * W, x[i]);
        }
        store(sums, total);
    }

    void raise(float to, float* sums, float* o, int d) {
        float shrink = __builtin_exp2f(reference - to);
        for (int i = 0; i < W; i++) sums[i] *= shrink;
        for (int c = 0; c < d; c++) o[c] *= shrink;
        reference = to;
    }
};

template <class T, int D> struct Decode {
    using E = typename Dot<T>::E;
    const DecodeArgs& a;
    const DecodeItem* items;
    float* partials;  // per item: [G][d] values, [G] references, [G] sums
    int32_t* left;    // at the first item of a (request, KV head): chunks not finished
    int64_t holes;
    int d, group;
    Ahead ahead;

    int64_t partial_floats() const { return (int64_t(group) * (d + 2) + 15) / 16 * 16; }

    void operator()(int64_t index, int64_t next) {
        const DecodeItem& item = items[index];
        chunk(item, next >= 0 ? &items[next] : nullptr, partials + index * partial_floats());
        if (__atomic_fetch_sub(&left[item.first], 1, __ATOMIC_ACQ_REL) == 1) merge(item);
    }

    // The key rows of up to `most` rows of a chunk.
    int64_t find_rows(const DecodeItem& item, int64_t most, const T** keys, int64_t& missing) const {
        const int64_t v0 = item.from, v1 = item.to < v0 + most ? item.to : v0 + most;
        const int64_t sink = item.sink_rows, shift = item.window_start - sink;
        UnitRows unit(a.cache, a.pages, item.request, a.unit0 + item.head, sizeof(T));
        int64_t rows = 0;
        if (v0 < sink) rows = unit.find(v0, v1 < sink ? v1 : sink, (const char**)keys, nullptr, missing);
        if (v1 > sink)
            rows += unit.find((v0 > sink ? v0 : sink) + shift, v1 + shift, (const char**)(keys + rows), nullptr,
                              missing);
        return rows;
    }

    // The biases of the rows whose keys are at `keys`.
    void find_biases(const T* const* keys, int rows, float* biases) const {
        const int64_t page_rows = a.cache.page_rows;
        for (int i = 0; i < rows; i++) {
            const int64_t row = (keys[i] - (const T*)a.cache.kv) / d;  // values count as rows, too
            biases[i] = a.cache.bias[row / (2 * page_rows) * page_rows + row % page_rows];
        }
    }

    void chunk(const DecodeItem& item, const DecodeItem* next, float* partial) {
        const T* keys[CHUNK_MOST + TILE + AHEAD_MOST];
        int64_t missing = 0, ignored = 0;
        const int64_t rows = find_rows(item, CHUNK_MOST, keys, missing);
        if (missing) __atomic_fetch_add(&holes, missing, __ATOMIC_RELAXED);

        // Sums are made here and not in `partials`, where the lines of other threads are near.
        const int64_t head_bytes = (TILE + W + 2 * d) * sizeof(float) + sizeof(Softmax);
        float* memory = (float*)scratch(1, group * head_bytes);
        float* s = memory;               // [group][TILE]
        float* sums = s + group * TILE;  // [group][W]
        float* o = sums + group * W;     // [group][d]
        E* q = (E*)(o + group * d);      // [group][d]
        Softmax* softmax = (Softmax*)(o + 2 * group * d);
        for (int g = 0; g < group; g++) {
            const T* from = (const T*)a.q + item.request * a.q_batch_stride + (item.head * group + g) * a.q_head_stride;
            for (int c = 0; c < d; c++) q[g * d + c] = Dot<T>::from(from[c]);
            softmax[g] = {-INFINITY, a.scale, a.logit_cap};
        }
        for (int i = 0; i < group * W; i++) sums[i] = 0;
        for (int i = 0; i < group * d; i++) o[i] = 0;

        if (rows > 0) {
            // After the last row come the first rows of the next item, to be prefetched.
            int64_t more = next ? find_rows(*next, AHEAD_MOST, keys + rows, ignored) : 0;
            for (int64_t i = rows + more; i < rows + TILE + AHEAD_MOST; i++) keys[i] = keys[i - 1];
            const int64_t to_value = a.cache.page_rows * d;
            float biases[TILE] = {};
            for (int i = 0; i < ahead.far; i++)
                for (int c = 0; c < d; c += LINE / sizeof(T)) {
                    prefetch(keys + i, c, {0, 0});
                    prefetch(keys + i, to_value + c, {0, 0});
                }
            for (int64_t t = 0; t < rows; t += TILE) {
                const int n = rows - t < TILE ? int(rows - t) : TILE;
                dot(q, keys + t, n, s);
                if (a.cache.bias) find_biases(keys + t, n, biases);
                const float* bias = a.cache.bias ? biases : nullptr;
                for (int g = 0; g < group; g++)
                    softmax[g].template tile<sizeof(T) == 4>(s + g * TILE, n, bias, sums + g * W, o + g * d, d);
                values(o, s, keys + t, to_value, n);
            }
        }
        __builtin_memcpy(partial, o, int64_t(group) * d * sizeof(float));
        for (int g = 0; g < group; g++) {
            partial[int64_t(group) * d + g] = softmax[g].reference;
            partial[int64_t(group) * d + group + g] = sum(load(sums + g * W));
        }
    }

    // Only the first of several passes over the same rows prefetches.
    inline void dot(const E* q, const T* const* keys, int rows, float* s) const {
        for (int i = 0; i < rows; i += W) {
            const T* const* k = keys + i;
            int g = 0;
            if (group >= HEADS) {
                dot_keys<T, D, HEADS, true>(q, k, d, s + i, ahead);
                for (g = HEADS; g + HEADS <= group; g += HEADS)
                    dot_keys<T, D, HEADS, false>(q + g * d, k, d, s + g * TILE + i, ahead);
                if (HEADS > 2 && group - g == 3) dot_keys<T, D, 3, false>(q + g * d, k, d, s + g * TILE + i, ahead);
                if (HEADS > 2 && group - g == 2) dot_keys<T, D, 2, false>(q + g * d, k, d, s + g * TILE + i, ahead);
                if (group - g == 1) dot_keys<T, D, 1, false>(q + g * d, k, d, s + g * TILE + i, ahead);
            } else {
                if (HEADS > 2 && group == 3) dot_keys<T, D, 3, true>(q, k, d, s + i, ahead);
                if (HEADS > 2 && group == 2) dot_keys<T, D, 2, true>(q, k, d, s + i, ahead);
                if (group == 1) dot_keys<T, D, 1, true>(q, k, d, s + i, ahead);
            }
        }
    }

    inline void values(float* o, const float* s, const T* const* k, int64_t to_value, int rows) const {
        int g = 0;
        if (group >= 4) {
            add_values<T, D, 4, true>(o, d, s, k, to_value, rows, ahead);
            for (g = 4; g + 4 <= group; g += 4)
                add_values<T, D, 4, false>(o + g * d, d, s + g * TILE, k, to_value, rows, ahead);
            if (group - g == 3) add_values<T, D, 3, false>(o + g * d, d, s + g * TILE, k, to_value, rows, ahead);
            if (group - g == 2) add_values<T, D, 2, false>(o + g * d, d, s + g * TILE, k, to_value, rows, ahead);
            if (group - g == 1) add_values<T, D, 1, false>(o + g * d, d, s + g * TILE, k, to_value, rows, ahead);
        } else {
            if (group == 3) add_values<T, D, 3, true>(o, d, s, k, to_value, rows, ahead);
            if (group == 2) add_values<T, D, 2, true>(o, d, s, k, to_value, rows, ahead);
            if (group == 1) add_values<T, D, 1, true>(o, d, s, k, to_value, rows, ahead);
        }
    }

    void merge(const DecodeItem& item) {
        float* first = partials + item.first * partial_floats();
        for (int g = 0; g < group; g++) {
            const int64_t reference = int64_t(group) * d + g, total = reference + group;
            float top = -INFINITY, sum = 0;
            float* o = first + int64_t(g) * d;
            for (int i = 0; i < item.chunks; i++) {
                float x = first[i * partial_floats() + reference];
                top = x > top ? x : top;
            }
            for (int i = 0; i < item.chunks; i++) {
                float* part = first + i * partial_floats();
                // A chunk without rows has nothing to add.  NaN gets through.
                if (part[total] == 0) continue;
                float weight = __builtin_exp2f(part[reference] - top);
                sum += weight * part[total];
                if (i == 0)
                    for (int c = 0; c < d; c++) o[c] *= weight;
                else
                    for (int c = 0; c < d; c++) o[c] += weight * part[int64_t(g) * d + c];
            }
            float inverse = sum == 0 ? 0 : 1 / sum;
            T* out = (T*)a.out + item.request * a.out_batch_stride + (item.head * group + g) * a.out_head_stride;
            for (int c = 0; c < d; c++) out[c] = from_float<T>(o[place<T>(c, d)] * inverse);
        }
    }
};

template <class T, int D> static int64_t decode_as(const DecodeArgs& a) {
    const int d = int(a.cache.head_size), group = int(a.query_heads / a.kv_heads);
    const int row_bytes = 2 * d * int(sizeof(T)), far = FAR_BYTES / row_bytes, near = NEAR_BYTES / row_bytes;
    const Ahead ahead{far < 4 ? 4 : far > AHEAD_MOST ? AHEAD_MOST : far, near < 2 ? 2 : near > TILE ? TILE : near};
    Decode<T, D> work{a, nullptr, nullptr, nullptr, 0, d, group, ahead};
    int64_t most = 0, visible_bytes = 0;
    for (int64_t b = 0; b < a.batch; b++) most += (a.lens[b] > 0 ? a.lens[b] : 0) / CHUNK + 1;
    most *= a.kv_heads;
    const int64_t part = work.partial_floats() * sizeof(float);
    char* memory = (char*)scratch(0, most * (part + sizeof(DecodeItem) + sizeof(int32_t)));
    DecodeItem* items = (DecodeItem*)(memory + most * part);
    work.partials = (float*)memory;
    work.items = items;
    work.left = (int32_t*)(items + most);

    int32_t count = 0;
    for (int32_t b = 0; b < a.batch; b++)
        for (int32_t h = 0; h < a.kv_heads; h++) {
            const int64_t n = a.lens[b] > 0 ? a.lens[b] : 0;
            const int64_t unit = b * a.bounds.batch_stride + a.unit0 + h;
            int64_t sink = a.bounds.sink[unit], start = n - a.bounds.recent[unit];
            start = start < 0 ? 0 : start > n ? n : start;
            sink = sink < 0 ? 0 : sink > start ? start : sink;  // no further than where the window begins
            const int64_t rows = sink + n - start, chunks = rows < CHUNK ? 1 : (rows + CHUNK / 2) / CHUNK;
            const int64_t each = ((rows + chunks - 1) / chunks + TILE - 1) / TILE * TILE;
            visible_bytes += rows * 2 * d * int64_t(sizeof(T));
            const int32_t first = count;
            for (int64_t from = 0; from < rows || count == first; from += each) {
                const int64_t to = from + each < rows ? from + each : rows;
                items[count++] = {b, h, int32_t(from), int32_t(to), first, 0, int32_t(sink), int32_t(start)};
            }
            for (int32_t i = first; i < count; i++) items[i].chunks = count - first;
            work.left[first] = count - first;
        }
    // A thread is woken for no less than 128 KiB, which take about as long as the waking.
    const int64_t useful = visible_bytes / (128 << 10) + 1;
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
        default: return decode_as<f16, 0>(a);
    }
}
