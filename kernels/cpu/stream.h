// Reads memory as fast as it goes, for measurements.  Included inside `namespace kvir::<isa>`.

struct StreamRead {
    static constexpr int64_t PIECE = 1 << 18;
    const char* from;
    int64_t bytes;
    float total;  // so that the reads are not optimised away

    void operator()(int64_t index, int64_t) {
        const float* p = (const float*)(from + index * PIECE);
        const int64_t n = (bytes - index * PIECE < PIECE ? bytes - index * PIECE : PIECE) / int64_t(sizeof(float));
        V acc[8];
        for (int u = 0; u < 8; u++) acc[u] = zero();
        for (int64_t i = 0; i + 8 * W <= n; i += 8 * W)
#pragma GCC unroll 8
            for (int u = 0; u < 8; u++) acc[u] = add(acc[u], load(p + i + u * W));
        for (int u = 1; u < 8; u++) acc[0] = add(acc[0], acc[u]);
        float x = sum(acc[0]);
        if (x == 1.2345e-30f) total = x;
    }
};

static void stream_read(const char* from, int64_t bytes, int threads) {
    StreamRead work{from, bytes, 0};
    parallel_items(threads, (bytes + StreamRead::PIECE - 1) / StreamRead::PIECE, work);
    asm volatile("" : : "r"(&work) : "memory");
}
