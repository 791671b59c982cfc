// The kernels of one instruction set: compiled once for each, with its flags and with KVIR_ISA as its name.
//
// Only headers without templates of the standard library may meet these flags: an inline function of theirs that is
// not inlined would be merged by the linker with the copies of the other instruction sets.
#include <math.h>
#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "args.h"
#include "parallel.h"

#define KVIR_TEXT(x) #x
#define KVIR_NAME(x) KVIR_TEXT(x)

namespace kvir {
namespace KVIR_ISA {
namespace {
#include "vec.h"
#include "rows.h"
#include "group.h"
#include "decode.h"
#include "tile.h"
#include "extend.h"
#include "stream.h"

bool runs_here() {
#if defined(__x86_64__)
    __builtin_cpu_init();
#if defined(__AVX512BF16__)
    if (!__builtin_cpu_supports("avx512bf16")) return false;
#endif
#if defined(__AVX512F__)
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return false;
#endif
#if defined(__AVX2__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return false;
#endif
#endif
    return true;
}
}  // namespace

extern const Isa isa;
const Isa isa{KVIR_NAME(KVIR_ISA), runs_here, decode, extend, stream_read};
}  // namespace KVIR_ISA
}  // namespace kvir
