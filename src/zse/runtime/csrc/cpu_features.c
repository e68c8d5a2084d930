/* What this CPU (and its operating system) can run: one bit per feature, in the order of FEATURES in isa.py. */
#include "zse_runtime.h"

#if defined(__x86_64__)

uint64_t zse_cpu_features(void) {
    uint64_t bits = 0;
    __builtin_cpu_init(); /* checks XCR0 too: a feature whose registers the system does not save counts as absent */
    bits |= (uint64_t)(__builtin_cpu_supports("avx2") != 0) << 0;
    bits |= (uint64_t)(__builtin_cpu_supports("fma") != 0) << 1;
    bits |= (uint64_t)(__builtin_cpu_supports("bmi2") != 0) << 2;
    bits |= (uint64_t)(__builtin_cpu_supports("avx512f") != 0) << 3;
    bits |= (uint64_t)(__builtin_cpu_supports("avx512bw") != 0) << 4;
    bits |= (uint64_t)(__builtin_cpu_supports("avx512dq") != 0) << 5;
    bits |= (uint64_t)(__builtin_cpu_supports("avx512vl") != 0) << 6;
    bits |= (uint64_t)(__builtin_cpu_supports("avx512cd") != 0) << 7;
    bits |= (uint64_t)(__builtin_cpu_supports("avx512vnni") != 0) << 8;
    {   /* f16c is not a name every compiler's __builtin_cpu_supports knows: CPUID leaf 1, ECX bit 29 */
        uint32_t a = 1, b, c = 0, d;
        __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
        bits |= (uint64_t)((c >> 29) & 1 && (bits & 1)) << 9;
    }
    {   /* nor avxvnni: leaf 7, whose subleaf 1 says it in EAX bit 4 */
        uint32_t a = 7, b, c = 0, d;
        __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
        if (a >= 1) {
            a = 7, c = 1;
            __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
            bits |= (uint64_t)((a >> 4) & 1 && (bits & 1)) << 10;
        }
    }
    return bits;
}

#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

uint64_t zse_cpu_features(void) {
    unsigned long caps = getauxval(AT_HWCAP);
    return (uint64_t)((caps >> 20) & 1) << 16   /* HWCAP_ASIMDDP: sdot/udot */
         | (uint64_t)((caps >> 10) & 1) << 17;  /* HWCAP_ASIMDHP: half-precision arithmetic */
}

#elif defined(__aarch64__) && defined(__APPLE__)

uint64_t zse_cpu_features(void) { return (1u << 16) | (1u << 17); } /* every Apple arm64 core has both */

#else

uint64_t zse_cpu_features(void) { return 0; }

#endif
