#include "xxh3.hpp"

#include "xxh3_lanes.hpp"

namespace kvactors {
namespace {

inline u64 read32(const u8* at) {
    u32 value;
    std::memcpy(&value, at, 4);
    return value;
}

inline u64 fold(u64 a, u64 b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return u64(product) ^ u64(product >> 64);
}

inline u64 rotated(u64 x, int bits) { return (x << bits) | (x >> (64 - bits)); }

inline u64 avalanche(u64 h) {
    h = (h ^ (h >> 37)) * kMix1;
    return h ^ (h >> 32);
}

inline u64 avalanche_short(u64 h) {
    h = (h ^ (h >> 33)) * kP64[1];
    h = (h ^ (h >> 29)) * kP64[2];
    return h ^ (h >> 32);
}

inline u64 mix16(const u8* data, const u8* secret) {
    return fold(read64(data) ^ read64(secret), read64(data + 8) ^ read64(secret + 8));
}

u64 up_to_16(const u8* data, std::size_t bytes) {
    if (bytes > 8) {
        const u64 low = read64(data) ^ read64(kSecret + 24) ^ read64(kSecret + 32);
        const u64 high = read64(data + bytes - 8) ^ read64(kSecret + 40) ^ read64(kSecret + 48);
        return avalanche(bytes + __builtin_bswap64(low) + high + fold(low, high));
    }
    if (bytes >= 4) {
        const u64 both = read32(data + bytes - 4) + (read32(data) << 32);
        u64 h = both ^ read64(kSecret + 8) ^ read64(kSecret + 16);
        h = (h ^ rotated(h, 49) ^ rotated(h, 24)) * kMix2;
        h = (h ^ ((h >> 35) + bytes)) * kMix2;
        return h ^ (h >> 28);
    }
    if (bytes == 0) return avalanche_short(read64(kSecret + 56) ^ read64(kSecret + 64));
    const u64 all = (u64(data[0]) << 16) | (u64(data[bytes >> 1]) << 24) | data[bytes - 1] | (bytes << 8);
    return avalanche_short(all ^ read32(kSecret) ^ read32(kSecret + 4));
}

u64 up_to_240(const u8* data, std::size_t bytes) {
    u64 sum = bytes * kP64[0];
    if (bytes <= 128) {
        for (std::size_t i = (bytes - 1) / 32 + 1; i-- > 0;) {
            sum += mix16(data + 16 * i, kSecret + 32 * i);
            sum += mix16(data + bytes - 16 * (i + 1), kSecret + 32 * i + 16);
        }
        return avalanche(sum);
    }
    const std::size_t rounds = bytes / 16;
    for (std::size_t i = 0; i < 8; ++i) sum += mix16(data + 16 * i, kSecret + 16 * i);
    sum = avalanche(sum);
    for (std::size_t i = 8; i < rounds; ++i) sum += mix16(data + 16 * i, kSecret + 16 * (i - 8) + 3);
    return avalanche(sum + mix16(data + bytes - 16, kSecret + 136 - 17));
}

struct Plain {
    u64 lanes[kLanes];
    explicit Plain(const u64* from) { std::memcpy(lanes, from, sizeof lanes); }
    void store(u64* to) const { std::memcpy(to, lanes, sizeof lanes); }
    void add(const u8* data, const u8* secret) {
        for (std::size_t i = 0; i < kLanes; ++i) {
            const u64 word = read64(data + 8 * i), key = word ^ read64(secret + 8 * i);
            lanes[i ^ 1] += word;
            lanes[i] += (key & 0xffffffffu) * (key >> 32);
        }
    }
    void scramble(const u8* secret) {
        for (std::size_t i = 0; i < kLanes; ++i)
            lanes[i] = (lanes[i] ^ (lanes[i] >> 47) ^ read64(secret + 8 * i)) * kP32[0];
    }
};

void sum_plain(u64* lanes, const u8* data, std::size_t bytes) { sum_lanes<Plain>(lanes, data, bytes); }

bool is_wide() {
#if defined(__x86_64__)
    static const bool wide = __builtin_cpu_supports("avx2");
    return wide;
#else
    return false;
#endif
}

u64 above_240(const u8* data, std::size_t bytes, bool wide) {
    u64 lanes[kLanes] = {kP32[2], kP64[0], kP64[1], kP64[2], kP64[3], kP32[1], kP64[4], kP32[0]};
    (wide ? xxh3_sum_wide : sum_plain)(lanes, data, bytes);
    u64 sum = bytes * kP64[0];
    for (std::size_t i = 0; i < 4; ++i)
        sum += fold(lanes[2 * i] ^ read64(kSecret + 11 + 16 * i), lanes[2 * i + 1] ^ read64(kSecret + 19 + 16 * i));
    return avalanche(sum);
}

}  // namespace

u64 xxh3_64(const u8* data, std::size_t bytes) {
    if (bytes <= 16) return up_to_16(data, bytes);
    return bytes <= 240 ? up_to_240(data, bytes) : above_240(data, bytes, is_wide());
}

u64 xxh3_64_plain(const u8* data, std::size_t bytes) {
    return bytes <= 240 ? xxh3_64(data, bytes) : above_240(data, bytes, false);
}

}  // namespace kvactors
