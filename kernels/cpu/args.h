// Arguments of the compiled kernels, and the table of one instruction set's kernels.  Legend: kernels/ops.py.
//
// Strides are in elements.  The innermost stride of every tensor is 1.
#pragma once
#include <cstdint>

namespace kvir {

enum class Dtype : int { float32 = 0, bfloat16 = 1, float16 = 2 };

struct CacheView {
    char* kv;               // [head_pages, 2, page_rows, head_size]
    float* bias;            // [head_pages, page_rows], or null
    const int32_t* table;   // [logical_pages, U]
    int64_t table_stride;
    int64_t head_pages;
    int64_t logical_pages;
    int64_t page_rows;
    int64_t head_size;
};

struct PagesView {
    const int32_t* pages;   // [B, max_pages]
    int64_t stride;
    int64_t max_pages;
};

struct BoundsView {
    const int32_t* sink;    // [U], or [batch, U]
    const int32_t* recent;
    int64_t batch_stride;  // 0: the same for every request
};

struct AppendArgs {
    const char* k;          // [tokens, kv_heads, D]
    int64_t k_token_stride, k_head_stride;
    const char* v;
    int64_t v_token_stride, v_head_stride;
    CacheView cache;
    const int64_t* slots;   // [tokens]
    int64_t tokens, kv_heads, unit0, element_bytes;
    int threads;
};

struct DecodeArgs {
    const char* q;          // [batch, query_heads, D]
    int64_t q_batch_stride, q_head_stride;
    char* out;              // [batch, query_heads, D]
    int64_t out_batch_stride, out_head_stride;
    CacheView cache;
    PagesView pages;
    const int32_t* lens;    // [batch]
    BoundsView bounds;
    int64_t batch, query_heads, kv_heads, unit0;
    float scale, logit_cap;
    Dtype dtype;
    int threads;
};

struct ExtendArgs {
    const char* q;          // [tokens, query_heads, D]
    int64_t q_token_stride, q_head_stride;
    const char* k;          // [tokens, kv_heads, D]
    int64_t k_token_stride, k_head_stride;
    const char* v;
    int64_t v_token_stride, v_head_stride;
    char* out;              // [tokens, query_heads, D]
    int64_t out_token_stride, out_head_stride;
    CacheView cache;
    PagesView pages;
    const int32_t* prefix_lens;  // [batch]
    const int32_t* extend_lens;  // [batch], sum = tokens
    BoundsView bounds;
    int64_t batch, query_heads, kv_heads, unit0;
    float scale, logit_cap;
    Dtype dtype;
    int threads;
};

// What one instruction set offers.
struct Isa {
    const char* name;
    bool (*runs_here)();
    int64_t (*decode)(const DecodeArgs&);  // number of holes
    int64_t (*extend)(const ExtendArgs&);  // number of holes
    void (*stream_read)(const char* from, int64_t bytes, int threads);
};

void append(const AppendArgs&);

}  // namespace kvir
