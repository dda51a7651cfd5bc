#include "sha256.hpp"

#if defined(__x86_64__) || defined(__i386__)
#define KVACTORS_X86 1
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace kvactors {
namespace {

alignas(16) constexpr u32 kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

constexpr u32 kInitial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                             0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

u32 load_be(const u8* p) { return u32(p[0]) << 24 | u32(p[1]) << 16 | u32(p[2]) << 8 | u32(p[3]); }

void store_be(u8* p, u32 v) {
    p[0] = u8(v >> 24);
    p[1] = u8(v >> 16);
    p[2] = u8(v >> 8);
    p[3] = u8(v);
}

u32 rotate(u32 x, unsigned n) { return x >> n | x << (32 - n); }

void compress_portable(u32 state[8], const u8* p, std::size_t blocks) {
    for (; blocks != 0; --blocks, p += 64) {
        u32 w[64];
        for (int i = 0; i < 16; ++i) w[i] = load_be(p + 4 * i);
        for (int i = 16; i < 64; ++i) {
            const u32 s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ (w[i - 15] >> 3);
            const u32 s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ (w[i - 2] >> 10);
            w[i] = w[i - 16] + s0 + w[i - 7] + s1;
        }
        u32 a = state[0], b = state[1], c = state[2], d = state[3];
        u32 e = state[4], f = state[5], g = state[6], h = state[7];
        for (int i = 0; i < 64; ++i) {
            const u32 s1 = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25);
            const u32 t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
            const u32 s0 = rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22);
            const u32 t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
            h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
        }
        state[0] += a, state[1] += b, state[2] += c, state[3] += d;
        state[4] += e, state[5] += f, state[6] += g, state[7] += h;
    }
}

#ifdef KVACTORS_X86

// The sha256rnds2 instruction needs this order of words in the two registers (ABEF, CDGH).
__attribute__((target("sha,sse4.1,ssse3"))) void compress_x86(u32 state[8], const u8* p, std::size_t blocks) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    __m128i t = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(state)), 0xB1);
    __m128i s1 = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4)), 0x1B);
    __m128i s0 = _mm_alignr_epi8(t, s1, 8);
    s1 = _mm_blend_epi16(s1, t, 0xF0);
    for (; blocks != 0; --blocks, p += 64) {
        const __m128i before0 = s0, before1 = s1;
        __m128i w[4];
        for (int i = 0; i < 4; ++i)
            w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * i)), swap);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            const __m128i round = _mm_load_si128(reinterpret_cast<const __m128i*>(kRound + 4 * i));
            const __m128i m = _mm_add_epi32(w[i & 3], round);
            s1 = _mm_sha256rnds2_epu32(s1, s0, m);
            s0 = _mm_sha256rnds2_epu32(s0, s1, _mm_shuffle_epi32(m, 0x0E));
            if (i < 12) {
                __m128i x = _mm_sha256msg1_epu32(w[i & 3], w[(i + 1) & 3]);
                x = _mm_add_epi32(x, _mm_alignr_epi8(w[(i + 3) & 3], w[(i + 2) & 3], 4));
                w[i & 3] = _mm_sha256msg2_epu32(x, w[(i + 3) & 3]);
            }
        }
        s0 = _mm_add_epi32(s0, before0);
        s1 = _mm_add_epi32(s1, before1);
    }
    t = _mm_shuffle_epi32(s0, 0x1B);
    s1 = _mm_shuffle_epi32(s1, 0xB1);
    s0 = _mm_blend_epi16(t, s1, 0xF0);
    s1 = _mm_alignr_epi8(s1, t, 8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state), s0);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), s1);
}

bool cpu_has_sha() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (b >> 29 & 1) == 0) return false;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0) return false;
    return (c >> 19 & 1) != 0 && (c >> 9 & 1) != 0;  // SSE4.1 and SSSE3
}

#endif

using Compress = void (*)(u32[8], const u8*, std::size_t);

Compress best_compress() {
#ifdef KVACTORS_X86
    if (cpu_has_sha()) return compress_x86;
#endif
    return compress_portable;
}

const Compress kBest = best_compress();

void store_digest(const u32 state[8], Key& out) {
    for (int i = 0; i < 8; ++i) store_be(out.bytes + 4 * i, state[i]);
}

// Writes the 0x80, zeros and bit length behind `bytes` of message. `room` is a multiple of 64.
void pad(u8* message, std::size_t bytes, std::size_t room) {
    std::memset(message + bytes, 0, room - bytes);
    message[bytes] = 0x80;
    store_be(message + room - 8, u32(u64(bytes) * 8 >> 32));
    store_be(message + room - 4, u32(u64(bytes) * 8));
}

std::size_t padded(std::size_t bytes) { return (bytes + 9 + 63) / 64 * 64; }

}  // namespace

bool sha256_accelerated() { return kBest != compress_portable; }

Key sha256(const u8* data, std::size_t bytes, bool force_portable) {
    const Compress compress = force_portable ? compress_portable : kBest;
    u32 state[8];
    std::memcpy(state, kInitial, sizeof state);
    const std::size_t whole = bytes / 64, rest = bytes % 64;
    if (whole != 0) compress(state, data, whole);
    u8 tail[128];
    if (rest != 0) std::memcpy(tail, data + whole * 64, rest);
    const std::size_t room = padded(rest);
    pad(tail, rest, room);
    const u64 bits = u64(bytes) * 8;
    store_be(tail + room - 8, u32(bits >> 32));
    store_be(tail + room - 4, u32(bits));
    compress(state, tail, room / 64);
    Key out;
    store_digest(state, out);
    return out;
}

ChainHasher::ChainHasher(u32 block_size) : block_size_(block_size) { lay_out(0); }

void ChainHasher::lay_out(u32 extra_bytes) {
    const std::size_t bytes = 36 + std::size_t(extra_bytes) + 4 * std::size_t(block_size_);
    message_.resize(padded(bytes));
    pad(message_.data(), bytes, message_.size());
    for (int i = 0; i < 4; ++i) message_[32 + i] = u8(extra_bytes >> (8 * i));
    extra_bytes_ = extra_bytes;
}

void ChainHasher::name(const Key& parent, const u32* tokens, const u8* extra, u32 extra_bytes, Key& out) {
    if (extra_bytes != extra_bytes_) lay_out(extra_bytes);
    u8* message = message_.data();
    std::memcpy(message, parent.bytes, 32);
    if (extra_bytes != 0) std::memcpy(message + 36, extra, extra_bytes);
    u8* at = message + 36 + extra_bytes;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    std::memcpy(at, tokens, 4 * std::size_t(block_size_));
#else
    for (u32 i = 0; i < block_size_; ++i)
        for (int b = 0; b < 4; ++b) *at++ = u8(tokens[i] >> (8 * b));
#endif
    u32 state[8];
    std::memcpy(state, kInitial, sizeof state);
    kBest(state, message, message_.size() / 64);
    store_digest(state, out);
}

}  // namespace kvactors
