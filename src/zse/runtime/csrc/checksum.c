/* CRC-32 as zlib's (the polynomial 0x04C11DB7, bits reflected), as fast as a core reads its second-level cache.
 *
 * x86-64: carry-less products fold the message onto itself, in vectors of 64 bytes where the CPU has such products, else of 16
 * (Gopal, Ozturk et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009). arm64 has
 * an instruction for 8 bytes.
 */
#include "zse_load.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#ifdef __linux__
#include <sys/auxv.h>
#endif
#endif

#define POLYNOMIAL 0xEDB88320u /* reflected */

/* Without the inversions at both ends; four bits at a time. */
static uint32_t plain(uint32_t crc, const unsigned char *bytes, int64_t nbytes) {
    static const uint32_t table[16] = {0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
                                       0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c, 0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c};
    for (int64_t i = 0; i < nbytes; i++) {
        crc ^= bytes[i];
        crc = table[crc & 15] ^ (crc >> 4);
        crc = table[crc & 15] ^ (crc >> 4);
    }
    return crc;
}

#if defined(__x86_64__)

/* x^(D + 32) and x^(D - 32) modulo the polynomial, reflected and shifted by one: what carries 16 bytes D bits on. */
#define FOLD_128 _mm_set_epi64x(0x0ccaa009ell, 0x1751997d0ll)
#define FOLD_512 _mm_set_epi64x(0x1c6e41596ll, 0x154442bd4ll)
#define FOLD_2048 _mm_set_epi64x(0x1322d1430ll, 0x11542778all)

__attribute__((target("pclmul,sse4.1"))) static __m128i fold(__m128i value, __m128i by, __m128i next) {
    return _mm_xor_si128(next, _mm_xor_si128(_mm_clmulepi64_si128(value, by, 0x00), _mm_clmulepi64_si128(value, by, 0x11)));
}

/* Four vectors that stand for all bytes so far become one, which has the message's remainder. */
__attribute__((target("pclmul,sse4.1"))) static uint32_t remainder_of(const __m128i *parts, const unsigned char *rest, int64_t nbytes) {
    __m128i by = FOLD_128, value = parts[0];
    unsigned char last[16];
    for (int i = 1; i < 4; i++) value = fold(value, by, parts[i]);
    for (; nbytes >= 16; rest += 16, nbytes -= 16) value = fold(value, by, _mm_loadu_si128((const __m128i *)rest));
    _mm_storeu_si128((__m128i *)last, value);
    return plain(plain(0, last, 16), rest, nbytes);
}

/* nbytes >= 64 */
__attribute__((target("pclmul,sse4.1"))) static uint32_t by_16(uint32_t crc, const unsigned char *bytes, int64_t nbytes) {
    __m128i by = FOLD_512, parts[4];
    for (int i = 0; i < 4; i++) parts[i] = _mm_loadu_si128((const __m128i *)bytes + i);
    parts[0] = _mm_xor_si128(parts[0], _mm_cvtsi32_si128((int)crc));
    for (bytes += 64, nbytes -= 64; nbytes >= 64; bytes += 64, nbytes -= 64)
        for (int i = 0; i < 4; i++) parts[i] = fold(parts[i], by, _mm_loadu_si128((const __m128i *)bytes + i));
    return remainder_of(parts, bytes, nbytes);
}

#define WIDE "avx512f,avx512vl,vpclmulqdq,pclmul,sse4.1"

__attribute__((target(WIDE))) static __m512i fold_64(__m512i value, __m512i by, __m512i next) {
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(value, by, 0x00), _mm512_clmulepi64_epi128(value, by, 0x11), next, 0x96);
}

/* nbytes >= 256 */
__attribute__((target(WIDE))) static uint32_t by_64(uint32_t crc, const unsigned char *bytes, int64_t nbytes) {
    __m512i by = _mm512_broadcast_i32x4(FOLD_2048);
    __m512i a = _mm512_loadu_si512(bytes), b = _mm512_loadu_si512(bytes + 64);
    __m512i c = _mm512_loadu_si512(bytes + 128), d = _mm512_loadu_si512(bytes + 192);
    a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
    for (bytes += 256, nbytes -= 256; nbytes >= 256; bytes += 256, nbytes -= 256) {
        a = fold_64(a, by, _mm512_loadu_si512(bytes));
        b = fold_64(b, by, _mm512_loadu_si512(bytes + 64));
        c = fold_64(c, by, _mm512_loadu_si512(bytes + 128));
        d = fold_64(d, by, _mm512_loadu_si512(bytes + 192));
    }
    by = _mm512_broadcast_i32x4(FOLD_512);
    a = fold_64(fold_64(fold_64(a, by, b), by, c), by, d);
    for (; nbytes >= 64; bytes += 64, nbytes -= 64) a = fold_64(a, by, _mm512_loadu_si512(bytes));
    __m128i parts[4];
    _mm512_storeu_si512(parts, a);
    return remainder_of(parts, bytes, nbytes);
}

static int width(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("sse4.1")) return 0;
    return __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") ? 64 : 16;
}

int32_t zse_crc32_is_fast(void) { return width() != 0; }

static uint32_t update(uint32_t crc, const unsigned char *bytes, int64_t nbytes) {
    int wide = nbytes >= 64 ? width() : 0;
    if (wide == 64 && nbytes >= 256) return by_64(crc, bytes, nbytes);
    return wide ? by_16(crc, bytes, nbytes) : plain(crc, bytes, nbytes);
}

#elif defined(__aarch64__)

int32_t zse_crc32_is_fast(void) {
#ifdef __linux__
    return (getauxval(AT_HWCAP) >> 7) & 1; /* HWCAP_CRC32 */
#else
    return 1; /* every Apple core */
#endif
}

__attribute__((target("+crc"))) static uint32_t by_8(uint32_t crc, const unsigned char *bytes, int64_t nbytes) {
    for (; nbytes >= 8; bytes += 8, nbytes -= 8) {
        uint64_t word;
        memcpy(&word, bytes, 8);
        crc = __crc32d(crc, word);
    }
    return plain(crc, bytes, nbytes);
}

static uint32_t update(uint32_t crc, const unsigned char *bytes, int64_t nbytes) {
    return zse_crc32_is_fast() ? by_8(crc, bytes, nbytes) : plain(crc, bytes, nbytes);
}

#else

int32_t zse_crc32_is_fast(void) { return 0; }

static uint32_t update(uint32_t crc, const unsigned char *bytes, int64_t nbytes) { return plain(crc, bytes, nbytes); }

#endif

uint32_t zse_crc32(uint32_t crc, const void *bytes, int64_t nbytes) { return ~update(~crc, bytes, nbytes); }

/* The product of two polynomials modulo the CRC's, reflected: the highest bit is x^0. */
static uint32_t product(uint32_t a, uint32_t b) {
    uint32_t result = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        if (a & bit) result ^= b;
        b = b & 1 ? (b >> 1) ^ POLYNOMIAL : b >> 1;
    }
    return result;
}

uint32_t zse_crc32_joined(uint32_t first, uint32_t second, int64_t nbytes) {
    uint32_t power = 1u << 31, square = 1u << 23; /* x^0, x^8 */
    for (int64_t left = nbytes; left > 0; left >>= 1) {
        if (left & 1) power = product(power, square);
        square = product(square, square);
    }
    return product(power, first) ^ second;
}
