#include "copy.hpp"

#include <unistd.h>

#include <stdexcept>

namespace kvactors {
namespace {

u8* piece(const Regions& regions, std::size_t region, std::int64_t block) {
    return reinterpret_cast<u8*>(regions.address[region]) + block * regions.piece_bytes[region];
}

u64 scramble(u64 x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

// Eight bytes of the pattern at a time: a counter started from the key and the region, scrambled (SplitMix64).
struct Pattern {
    Pattern(const Key& key, std::size_t region) {
        u64 words[4];
        std::memcpy(words, key.bytes, 32);
        state = scramble(region + 1);
        for (u64 word : words) state = scramble(state ^ word);
    }
    u64 at(std::size_t word) const { return scramble(state + word * 0x9e3779b97f4a7c15ULL); }
    u64 state;
};

void write_pattern(const Pattern& pattern, u8* to, std::size_t bytes) {
    std::size_t word = 0;
    for (; bytes >= 8; bytes -= 8, to += 8, ++word) {
        const u64 value = pattern.at(word);
        std::memcpy(to, &value, 8);
    }
    const u64 value = pattern.at(word);
    std::memcpy(to, &value, bytes);
}

bool has_pattern(const Pattern& pattern, const u8* from, std::size_t bytes) {
    u64 differs = 0;
    std::size_t word = 0;
    for (; bytes >= 8; bytes -= 8, from += 8, ++word) {
        u64 value;
        std::memcpy(&value, from, 8);
        differs |= value ^ pattern.at(word);
    }
    const u64 value = pattern.at(word);
    return differs == 0 && std::memcmp(from, &value, bytes) == 0;
}

}  // namespace

void require_blocks(const Regions& regions, const std::int64_t* blocks, std::size_t n) {
    for (std::size_t r = 0; r < regions.count; ++r)
        if (regions.piece_bytes[r] <= 0) throw std::invalid_argument("piece_bytes must be positive");
    for (std::size_t j = 0; j < n; ++j)
        if (blocks[j] < 0 || blocks[j] >= regions.blocks) throw std::invalid_argument("device block id out of range");
}

void require_slots(const Regions& regions, const Slots& slots, const std::int64_t* ids, std::size_t n) {
    std::size_t total = 0;
    for (std::size_t r = 0; r < regions.count; ++r) total += std::size_t(regions.piece_bytes[r]);
    if (total > slots.stride) throw std::invalid_argument("slot_stride is smaller than the pieces of one block");
    for (std::size_t j = 0; j < n; ++j)
        if (ids[j] < 0 || ids[j] >= slots.count) throw std::invalid_argument("slot id out of range");
}

void gather(const Regions& regions, const std::int64_t* blocks, const Slots& slots, const std::int64_t* ids, std::size_t n) {
    for (std::size_t j = 0; j < n; ++j) {
        u8* slot = slots.arena + std::size_t(ids[j]) * slots.stride;
        for (std::size_t r = 0; r < regions.count; ++r) {
            std::memcpy(slot, piece(regions, r, blocks[j]), std::size_t(regions.piece_bytes[r]));
            slot += regions.piece_bytes[r];
        }
    }
}

void scatter(const Regions& regions, const std::int64_t* blocks, const Slots& slots, const std::int64_t* ids, std::size_t n) {
    for (std::size_t j = 0; j < n; ++j) {
        const u8* slot = slots.arena + std::size_t(ids[j]) * slots.stride;
        for (std::size_t r = 0; r < regions.count; ++r) {
            std::memcpy(piece(regions, r, blocks[j]), slot, std::size_t(regions.piece_bytes[r]));
            slot += regions.piece_bytes[r];
        }
    }
}

void touch(u8* address, std::size_t bytes) {
    const std::size_t page = std::size_t(sysconf(_SC_PAGESIZE));
    for (std::size_t i = 0; i < bytes; i += page) *const_cast<volatile u8*>(address + i) = 0;
    if (bytes != 0) *const_cast<volatile u8*>(address + bytes - 1) = 0;
}

void fill_blocks(const Regions& regions, const std::int64_t* blocks, const Key* keys, std::size_t n) {
    for (std::size_t j = 0; j < n; ++j)
        for (std::size_t r = 0; r < regions.count; ++r)
            write_pattern(Pattern(keys[j], r), piece(regions, r, blocks[j]), std::size_t(regions.piece_bytes[r]));
}

std::vector<u32> check_blocks(const Regions& regions, const std::int64_t* blocks, const Key* keys, std::size_t n) {
    std::vector<u32> wrong;
    for (std::size_t j = 0; j < n; ++j)
        for (std::size_t r = 0; r < regions.count; ++r)
            if (!has_pattern(Pattern(keys[j], r), piece(regions, r, blocks[j]), std::size_t(regions.piece_bytes[r]))) {
                wrong.push_back(u32(j));
                break;
            }
    return wrong;
}

}  // namespace kvactors
