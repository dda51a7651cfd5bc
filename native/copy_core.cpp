#include "copy_core.hpp"

#include <algorithm>
#include <utility>

#include "give_way.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvactors {
namespace {

// A batch larger than the caches is written past them: ordinary stores would first read every line
// they overwrite. libc's memcpy does the same, but only when a single piece is that large.
constexpr std::size_t kStreamFrom = std::size_t(8) << 20;

constexpr std::size_t kSequences = 4, kPart = 1024;  // parts of a piece that are copied together, and bytes of one

#if defined(__x86_64__)
bool can_stream() {
    static const bool can = __builtin_cpu_supports("avx2");
    return can;
}

__attribute__((target("avx2"))) void stream_copy(u8* to, const u8* from, std::size_t bytes) {
    // Whole lines: a part of one occupies a buffer of the processor until the rest is written.
    const std::size_t lead = (64 - (reinterpret_cast<std::uintptr_t>(to) & 63)) & 63;
    if (bytes < 1024) {
        std::memcpy(to, from, bytes);
        return;
    }
    std::memcpy(to, from, lead);
    to += lead;
    from += lead;
    bytes -= lead;
    // A processor fetches one sequence of lines ahead only so far. Several of them keep more of the
    // memory busy.
    const std::size_t part = bytes / kSequences & ~std::size_t(63);
    if (part >= kPart) {
        for (std::size_t at = 0; at < part; at += 64) {
            __m256i line[2 * kSequences];
            for (std::size_t i = 0; i < 2 * kSequences; ++i)
                line[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i / 2 * part + at + i % 2 * 32));
            for (std::size_t i = 0; i < 2 * kSequences; ++i)
                _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i / 2 * part + at + i % 2 * 32), line[i]);
        }
        to += kSequences * part;
        from += kSequences * part;
        bytes -= kSequences * part;
    }
    for (; bytes >= 64; bytes -= 64, to += 64, from += 64) {
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), a);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), b);
    }
    std::memcpy(to, from, bytes);
}

void end_stream() { _mm_sfence(); }
#else
bool can_stream() { return false; }
void stream_copy(u8* to, const u8* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
void end_stream() {}
#endif

bool worth_streaming(const Regions& regions, std::size_t pairs) {
    std::size_t block = 0;
    for (std::size_t r = 0; r < regions.count; ++r) block += std::size_t(regions.piece_bytes[r]);
    return block * pairs >= kStreamFrom && can_stream();
}

// The pieces of a batch. Between parts of them the thread gives way.
class Pieces {
public:
    explicit Pieces(bool stream) : stream_(stream) {}
    void copy(u8* to, const u8* from, std::size_t bytes) {
        while (bytes != 0) {  // an empty region may have no address
            const std::size_t part = std::min(bytes, kMost);
            if (stream_) stream_copy(to, from, part);
            else std::memcpy(to, from, part);
            if ((done_ += part) >= kLeast) give_way(std::exchange(done_, 0));
            to += part;
            from += part;
            bytes -= part;
        }
    }

private:
    static constexpr std::size_t kMost = std::size_t(1) << 20, kLeast = std::size_t(256) << 10;  // bytes
    const bool stream_;
    std::size_t done_ = 0;
};

u8* piece(const Regions& regions, std::size_t r, i64 block) {
    const i64* const steps = regions.strides != nullptr ? regions.strides : regions.piece_bytes;
    return reinterpret_cast<u8*>(regions.address[r]) + std::size_t(block) * std::size_t(steps[r]);
}

u8* slot_start(const Slots& slots, i64 id) {
    const std::size_t slot = std::size_t(id);
    if (slots.per_row == 1) return slots.arena + slot * slots.stride;
    return slots.arena + slot / slots.per_row * slots.stride + slot % slots.per_row * slots.slot_bytes;
}

// SplitMix64: a counter through a mixer, so that any word can be computed alone.
u64 word(u64 seed, u64 index) {
    u64 x = seed + (index + 1) * 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

u64 seed_of(const u8* key, std::size_t region) {
    u64 seed = region * 0xd1342543de82ef95ULL;
    for (int i = 0; i < 4; ++i) {
        u64 part;
        std::memcpy(&part, key + 8 * i, 8);
        seed = word(seed ^ part, u64(i));
    }
    return seed;
}

}  // namespace

void gather(const Regions& regions, const i64* blocks, Slots slots, const i64* ids, std::size_t pairs) {
    const bool stream = worth_streaming(regions, pairs);
    Pieces pieces(stream);
    for (std::size_t j = 0; j < pairs; ++j) {
        u8* to = slot_start(slots, ids[j]);
        for (std::size_t r = 0; r < regions.count; ++r) {
            const std::size_t bytes = std::size_t(regions.piece_bytes[r]);
            pieces.copy(to, piece(regions, r, blocks[j]), bytes);
            to += bytes;
        }
    }
    if (stream) end_stream();
}

void scatter(const Regions& regions, const i64* blocks, Slots slots, const i64* ids, std::size_t pairs) {
    const bool stream = worth_streaming(regions, pairs);
    Pieces pieces(stream);
    for (std::size_t j = 0; j < pairs; ++j) {
        const u8* from = slot_start(slots, ids[j]);
        for (std::size_t r = 0; r < regions.count; ++r) {
            const std::size_t bytes = std::size_t(regions.piece_bytes[r]);
            pieces.copy(piece(regions, r, blocks[j]), from, bytes);
            from += bytes;
        }
    }
    if (stream) end_stream();
}

void touch(u8* memory, std::size_t bytes) {
    volatile u8* page = memory;
    for (std::size_t i = 0; i < bytes; i += 4096) page[i] = 0;
    if (bytes != 0) page[bytes - 1] = 0;  // memory that does not start on a page ends on one more
}

void fill_block(const Regions& regions, i64 block, const u8* key) {
    for (std::size_t r = 0; r < regions.count; ++r) {
        u8* to = piece(regions, r, block);
        const std::size_t bytes = std::size_t(regions.piece_bytes[r]), whole = bytes / 8;
        if (bytes == 0) continue;
        const u64 seed = seed_of(key, r);
        for (std::size_t i = 0; i < whole; ++i) {
            const u64 value = word(seed, i);
            std::memcpy(to + 8 * i, &value, 8);
        }
        const u64 last = word(seed, whole);
        std::memcpy(to + 8 * whole, &last, bytes - 8 * whole);
    }
}

bool check_block(const Regions& regions, i64 block, const u8* key) {
    for (std::size_t r = 0; r < regions.count; ++r) {
        const u8* from = piece(regions, r, block);
        const std::size_t bytes = std::size_t(regions.piece_bytes[r]), whole = bytes / 8;
        if (bytes == 0) continue;
        const u64 seed = seed_of(key, r);
        u64 differs = 0;
        for (std::size_t i = 0; i < whole; ++i) {
            u64 value;
            std::memcpy(&value, from + 8 * i, 8);
            differs |= value ^ word(seed, i);
        }
        const u64 last = word(seed, whole);
        if (differs != 0 || std::memcmp(from + 8 * whole, &last, bytes - 8 * whole) != 0) return false;
    }
    return true;
}

}  // namespace kvactors
