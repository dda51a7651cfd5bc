// Compiled for AVX2 where the CPU's family has it (CMakeLists.txt).
#include "xxh3_lanes.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace kvactors {

#if defined(__AVX2__)
namespace {

// Four lanes in each of two registers.
struct Wide {
    __m256i a, b;
    static __m256i load(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
    explicit Wide(const u64* from) : a(load(from)), b(load(from + 4)) {}
    void store(u64* to) const {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), a);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 4), b);
    }
    static __m256i added(__m256i lanes, __m256i words, __m256i secret) {
        const __m256i key = _mm256_xor_si256(words, secret);
        const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
        const __m256i swapped = _mm256_shuffle_epi32(words, 0x4e);
        return _mm256_add_epi64(_mm256_add_epi64(lanes, swapped), product);
    }
    void add(const u8* data, const u8* secret) {
        a = added(a, load(data), load(secret));
        b = added(b, load(data + 32), load(secret + 32));
    }
    static __m256i scrambled(__m256i lanes, __m256i secret) {
        const __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47)), secret);
        const __m256i prime = _mm256_set1_epi64x(static_cast<long long>(kP32[0]));
        const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
        return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
    }
    void scramble(const u8* secret) {
        a = scrambled(a, load(secret));
        b = scrambled(b, load(secret + 32));
    }
};

}  // namespace

void xxh3_sum_wide(u64* lanes, const u8* data, std::size_t bytes) { sum_lanes<Wide>(lanes, data, bytes); }
#else
void xxh3_sum_wide(u64*, const u8*, std::size_t) {}  // never called
#endif

}  // namespace kvactors
