// Vectors of floats as wide as the instruction set that this file is compiled for, and what the kernels need of them.
//
// Included once per translation unit, inside `namespace kvir::<isa>`: nothing here may have external linkage, or the
// linker could hand the code of one instruction set to another.
//
// `load` also widens bfloat16 and float16.  `vmax(a, b)` gives b where either is NaN, and `exp2_` of NaN is NaN, so
// that poisoned rows reach the output.

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

static inline float bits_to_float(uint32_t u) { float f; __builtin_memcpy(&f, &u, 4); return f; }
static inline uint32_t float_to_bits(float f) { uint32_t u; __builtin_memcpy(&u, &f, 4); return u; }

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) { return bits_to_float(uint32_t(x.bits) << 16); }
static inline float to_float(f16 x) {
    // Rebias the exponent by a multiplication (it also normalises subnormals); infinity and NaN by hand.
    uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13, sign = uint32_t(x.bits & 0x8000) << 16;
    if (magnitude >= 0x7c00u << 13) return bits_to_float(sign | magnitude | 0x7f800000);
    return bits_to_float(sign | float_to_bits(bits_to_float(magnitude) * 0x1p112f));
}

template <class T> static inline T from_float(float x);
template <> inline float from_float<float>(float x) { return x; }
template <> inline bf16 from_float<bf16>(float x) {
    uint32_t u = float_to_bits(x);
    if (x != x) return {uint16_t((u >> 16) | 0x40)};
    return {uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}
template <> inline f16 from_float<f16>(float x) {
    uint32_t u = float_to_bits(x), sign = (u >> 16) & 0x8000;
    u &= 0x7fffffff;
    if (u > 0x7f800000) return {uint16_t(sign | 0x7e00)};
    if (u >= 0x47800000) return {uint16_t(sign | 0x7c00)};  // 65536 and more
    if (u < 0x38800000) {                                     // subnormal: let an addition round it
        float aligned = bits_to_float(u) + 0.5f;
        return {uint16_t(sign | (float_to_bits(aligned) - 0x3f000000))};
    }
    u += 0xc8000fff + ((u >> 13) & 1);
    return {uint16_t(sign | (u >> 13))};
}

#if defined(__AVX512F__)

using V = __m512;
constexpr int W = 16;

static inline V zero() { return _mm512_setzero_ps(); }
static inline V set1(float x) { return _mm512_set1_ps(x); }
static inline V load(const float* p) { return _mm512_loadu_ps(p); }
static inline V load(const bf16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static inline V load(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
// The first n lanes; the rest is zero.
static inline V load_part(const float* p, int n) { return _mm512_maskz_loadu_ps((1u << n) - 1, p); }
static inline V load_part(const bf16* p, int n) {
    __m256i narrow = _mm256_maskz_loadu_epi16((1u << n) - 1, p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}
static inline V load_part(const f16* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16((1u << n) - 1, p)); }
static inline void store_part(float* p, V x, int n) { _mm512_mask_storeu_ps(p, (1u << n) - 1, x); }
// The even and the odd ones of 2 W elements.
static inline void split(const bf16* p, V& even, V& odd) {
    __m512i both = _mm512_loadu_si512(p);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000))));
}
static inline void store(float* p, V x) { _mm512_storeu_ps(p, x); }
static inline V add(V a, V b) { return _mm512_add_ps(a, b); }
static inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
static inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
static inline V div(V a, V b) { return _mm512_div_ps(a, b); }
static inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
static inline V vmax(V a, V b) { return _mm512_max_ps(a, b); }
static inline V vmin(V a, V b) { return _mm512_min_ps(a, b); }
static inline float sum(V a) { return _mm512_reduce_add_ps(a); }
static inline float max_lane(V a) { return _mm512_reduce_max_ps(a); }
// a where lo < x <= hi, else -inf
static inline V keep_between(V a, V lo, V x, V hi) {
    __mmask16 keep = _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(lo, x, _CMP_LT_OQ), x, hi, _CMP_LE_OQ);
    return _mm512_mask_mov_ps(set1(-INFINITY), keep, a);
}
// The first n lanes of a, -inf in the others.
static inline V keep_first(V a, int n) {
    return n >= W ? a : _mm512_mask_mov_ps(set1(-INFINITY), __mmask16((1u << n) - 1), a);
}
static inline V round_(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
constexpr float EXP2_FLOOR = -150.f;
static inline V scale_by_exp2(V p, V n, V) { return _mm512_scalef_ps(p, n); }
static inline bool any_above(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
// In every 128 bits of the result, number i is the sum of those 128 bits of v[i].
static inline V sums_of_4(const V* v) {
    V a = add(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    V b = add(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return add(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}
// The sums over the four 128 bits of q[0], then of q[1], ...
static inline V join_quads(const V* q) {
    V a = add(_mm512_shuffle_f32x4(q[0], q[1], 0x88), _mm512_shuffle_f32x4(q[0], q[1], 0xdd));
    V b = add(_mm512_shuffle_f32x4(q[2], q[3], 0x88), _mm512_shuffle_f32x4(q[2], q[3], 0xdd));
    return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

#elif defined(__AVX2__)

using V = __m256;
constexpr int W = 8;

static inline V zero() { return _mm256_setzero_ps(); }
static inline V set1(float x) { return _mm256_set1_ps(x); }
static inline V load(const float* p) { return _mm256_loadu_ps(p); }
static inline V load(const bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline V load(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
static inline void store(float* p, V x) { _mm256_storeu_ps(p, x); }
static inline V add(V a, V b) { return _mm256_add_ps(a, b); }
static inline V sub(V a, V b) { return _mm256_sub_ps(a, b); }
static inline V mul(V a, V b) { return _mm256_mul_ps(a, b); }
static inline V div(V a, V b) { return _mm256_div_ps(a, b); }
static inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
static inline V vmax(V a, V b) { return _mm256_max_ps(a, b); }
static inline V vmin(V a, V b) { return _mm256_min_ps(a, b); }
static inline V keep_between(V a, V lo, V x, V hi) {
    V keep = _mm256_and_ps(_mm256_cmp_ps(lo, x, _CMP_LT_OQ), _mm256_cmp_ps(x, hi, _CMP_LE_OQ));
    return _mm256_blendv_ps(set1(-INFINITY), a, keep);
}
static inline V keep_first(V a, int n) {
    V lane = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);
    return n >= W ? a : _mm256_blendv_ps(set1(-INFINITY), a, _mm256_cmp_ps(lane, set1(float(n)), _CMP_LT_OQ));
}
static inline V round_(V x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
constexpr float EXP2_FLOOR = -125.f;
// p * 2^n, or zero where x is at the floor.
static inline V scale_by_exp2(V p, V n, V x) {
    __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    V scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
    return _mm256_andnot_ps(_mm256_cmp_ps(x, set1(EXP2_FLOOR), _CMP_LE_OQ), scaled);
}
static inline bool any_above(V a, V b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }
static inline void split(const bf16* p, V& even, V& odd) {
    __m256i both = _mm256_loadu_si256((const __m256i*)p);
    even = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    odd = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(int(0xffff0000))));
}
static inline V sums_of_4(const V* v) { return _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3])); }
static inline V join_quads(const V* q) {
    return add(_mm256_permute2f128_ps(q[0], q[1], 0x20), _mm256_permute2f128_ps(q[0], q[1], 0x31));
}
static inline float sum(V a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
static inline float max_lane(V a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}

#else  // any machine: 4 lanes by the compiler's own vectors

typedef float V __attribute__((vector_size(16)));
typedef int32_t VI __attribute__((vector_size(16)));
typedef uint16_t VH __attribute__((vector_size(8)));
constexpr int W = 4;

static inline V zero() { return V{0, 0, 0, 0}; }
static inline V set1(float x) { return V{x, x, x, x}; }
static inline V load(const float* p) { V x; __builtin_memcpy(&x, p, 16); return x; }
static inline V load(const bf16* p) {
    VH x;
    __builtin_memcpy(&x, p, 8);
    return (V)(__builtin_convertvector(x, VI) << 16);
}
static inline V load(const f16* p) { return V{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])}; }
static inline void store(float* p, V x) { __builtin_memcpy(p, &x, 16); }
static inline V add(V a, V b) { return a + b; }
static inline V sub(V a, V b) { return a - b; }
static inline V mul(V a, V b) { return a * b; }
static inline V div(V a, V b) { return a / b; }
static inline V fma(V a, V b, V c) { return a * b + c; }
static inline V select(VI where, V a, V b) { return (V)((where & (VI)a) | (~where & (VI)b)); }
static inline V vmax(V a, V b) { return select(a > b, a, b); }
static inline V vmin(V a, V b) { return select(a < b, a, b); }
static inline V keep_between(V a, V lo, V x, V hi) { return select((lo < x) & (x <= hi), a, set1(-INFINITY)); }
static inline V keep_first(V a, int n) { return select(VI{0, 1, 2, 3} < VI{n, n, n, n}, a, set1(-INFINITY)); }
static inline V round_(V x) {
    const V shift = set1(12582912.f);  // 1.5 * 2^23: adding it leaves no room for a fraction
    return (x + shift) - shift;
}
constexpr float EXP2_FLOOR = -125.f;
static inline V scale_by_exp2(V p, V n, V x) {
    VI exponent = __builtin_convertvector(n, VI) << 23;
    return (V)((VI)((V)((VI)p + exponent)) & ~(VI)(x <= set1(EXP2_FLOOR)));
}
static inline bool any_above(V a, V b) { return a[0] > b[0] || a[1] > b[1] || a[2] > b[2] || a[3] > b[3]; }
static inline void split(const bf16* p, V& even, V& odd) {
    VI both;
    __builtin_memcpy(&both, p, 16);
    // Of each 32 bits the lower half comes first in memory: bf16 pools are little-endian.
    even = (V)(both << 16);
    odd = (V)(both & int32_t(0xffff0000));
}
static inline V sums_of_4(const V* v) {
    return V{v[0][0], v[1][0], v[2][0], v[3][0]} + V{v[0][1], v[1][1], v[2][1], v[3][1]} +
           (V{v[0][2], v[1][2], v[2][2], v[3][2]} + V{v[0][3], v[1][3], v[2][3], v[3][3]});
}
static inline V join_quads(const V* q) { return q[0]; }
static inline float sum(V a) { return (a[0] + a[1]) + (a[2] + a[3]); }
static inline float max_lane(V a) {
    float x = a[0] > a[1] ? a[0] : a[1], y = a[2] > a[3] ? a[2] : a[3];
    return x > y ? x : y;
}

#endif

#if !defined(__AVX512F__)
template <class T> static inline V load_part(const T* p, int n) {
    float x[W] = {};
    for (int i = 0; i < n; i++) x[i] = to_float(p[i]);
    return load(x);
}
static inline void store_part(float* p, V x, int n) {
    float lanes[W];
    store(lanes, x);
    for (int i = 0; i < n; i++) p[i] = lanes[i];
}
#endif

// 2^x for x <= about 0; exactly 0 far below.  Minimax polynomials on [-1/2, 1/2]: relative error 2e-9 or, where the
// result is rounded to 16 bits anyway, 3e-6.
template <bool PRECISE> static inline V exp2_(V x) {
    x = vmax(set1(EXP2_FLOOR), x);
    V n = round_(x), f = sub(x, n), p;
    if (PRECISE) {
        p = fma(set1(0x1.41d334p-13f), f, set1(0x1.5f456ap-10f));
        p = fma(p, f, set1(0x1.3b2dbcp-7f));
        p = fma(p, f, set1(0x1.c6aed4p-5f));
        p = fma(p, f, set1(0x1.ebfbdap-3f));
        p = fma(p, f, set1(0x1.62e430p-1f));
        p = fma(p, f, set1(1.f));
    } else {
        p = fma(set1(0x1.3997d6p-7f), f, set1(0x1.ca1440p-5f));
        p = fma(p, f, set1(0x1.ec06dap-3f));
        p = fma(p, f, set1(0x1.62e0dcp-1f));
        p = fma(p, f, set1(0x1.ffffe8p-1f));
    }
    return scale_by_exp2(p, n, x);
}

// tanh, to a few units in the last place: the rational approximation that Eigen uses (odd degree 13 over even 6).
static inline V tanh_(V x) {
    x = vmax(set1(-7.90531110763549805f), vmin(set1(7.90531110763549805f), x));
    V y = mul(x, x);
    V p = fma(set1(-2.76076847742355e-16f), y, set1(2.00018790482477e-13f));
    p = fma(p, y, set1(-8.60467152213735e-11f));
    p = fma(p, y, set1(5.12229709037114e-08f));
    p = fma(p, y, set1(1.48572235717979e-05f));
    p = fma(p, y, set1(6.37261928875436e-04f));
    p = fma(p, y, set1(4.89352455891786e-03f));
    V q = fma(set1(1.19825839466702e-06f), y, set1(1.18534705686654e-04f));
    q = fma(q, y, set1(2.26843463243900e-03f));
    q = fma(q, y, set1(4.89352518554385e-03f));
    return div(mul(x, p), q);
}
