// Copies and patterns over memory with known bytes, run under the address and undefined-behaviour
// sanitizers.
#include "copy_core.hpp"

#undef NDEBUG
#include <cassert>
#include <cstdio>

using namespace kvactors;

namespace {

constexpr i64 kBlocks = 5, kSlots = 7;
constexpr u8 kUntouched = 0xee;

// Regions of different piece sizes, one of them empty, and slots wider than a block.
struct World {
    std::vector<i64> pieces{8, 1, 0, 13, 64};
    std::vector<std::vector<u8>> memory;
    std::vector<i64> addresses;
    std::size_t block_bytes = 0, stride = 0;
    std::vector<u8> arena;

    World() {
        for (const i64 piece : pieces) {
            memory.emplace_back(std::size_t(piece * kBlocks), kUntouched);
            addresses.push_back(i64(reinterpret_cast<std::uintptr_t>(memory.back().data())));
            block_bytes += std::size_t(piece);
        }
        stride = block_bytes + 3;
        arena.assign(stride * kSlots, kUntouched);
    }
    Regions regions() const { return {addresses.data(), pieces.data(), pieces.size()}; }
    Slots slots() { return {arena.data(), stride}; }
    void number_device() {
        for (std::size_t r = 0; r < memory.size(); ++r)
            for (std::size_t i = 0; i < memory[r].size(); ++i) memory[r][i] = expected(r, i);
    }
    static u8 expected(std::size_t r, std::size_t i) { return u8(r * 67 + i * 3 + 1); }
};

void gather_lays_the_pieces_one_after_another() {
    World world;
    world.number_device();
    const i64 blocks[] = {4, 0, 2}, slots[] = {1, 6, 0};
    gather(world.regions(), blocks, world.slots(), slots, 3);
    std::vector<u8> expected(world.arena.size(), kUntouched);
    for (int j = 0; j < 3; ++j) {
        std::size_t at = std::size_t(slots[j]) * world.stride;
        for (std::size_t r = 0; r < world.pieces.size(); ++r)
            for (i64 i = 0; i < world.pieces[r]; ++i)
                expected[at++] = World::expected(r, std::size_t(blocks[j] * world.pieces[r] + i));
    }
    assert(world.arena == expected);  // the gaps between slots and the other slots included
}

void scatter_is_the_inverse() {
    World from, to;
    from.number_device();
    const i64 blocks[] = {3, 1}, slots[] = {2, 5}, others[] = {0, 4};
    gather(from.regions(), blocks, from.slots(), slots, 2);
    scatter(to.regions(), others, from.slots(), slots, 2);
    for (std::size_t r = 0; r < to.pieces.size(); ++r) {
        const std::size_t piece = std::size_t(to.pieces[r]);
        for (std::size_t b = 0; b < std::size_t(kBlocks); ++b)
            for (std::size_t i = 0; i < piece; ++i) {
                const u8 byte = to.memory[r][b * piece + i];
                if (b == 0) assert(byte == World::expected(r, 3 * piece + i));
                else if (b == 4) assert(byte == World::expected(r, 1 * piece + i));
                else assert(byte == kUntouched);
            }
    }
}

// A batch this large is written past the caches, in vectors, at any alignment of its pieces.
void a_large_batch_arrives_whole() {
    const std::vector<i64> pieces{600001, 700, 1023, 1024, 1089, 4095, 4096, 4159, 4160, 4223, 8191, 300000};
    const std::size_t pairs = 11;
    std::vector<std::vector<u8>> memory, back;
    std::vector<i64> addresses, back_addresses;
    std::size_t block_bytes = 0;
    for (const i64 piece : pieces) {
        block_bytes += std::size_t(piece);
        std::vector<u8> region(std::size_t(piece) * pairs);
        for (std::size_t i = 0; i < region.size(); ++i) region[i] = u8(i * 2654435761u >> 13);
        back.emplace_back(region.size(), kUntouched);
        memory.push_back(std::move(region));
        addresses.push_back(i64(reinterpret_cast<std::uintptr_t>(memory.back().data())));
        back_addresses.push_back(i64(reinterpret_cast<std::uintptr_t>(back.back().data())));
    }
    assert(block_bytes * pairs > std::size_t(8) << 20);
    std::vector<u8> arena(block_bytes * pairs, kUntouched);
    std::vector<i64> blocks, slots;
    for (std::size_t j = 0; j < pairs; ++j) {
        blocks.push_back(i64(j * 3 % pairs));
        slots.push_back(i64(j));
    }
    gather({addresses.data(), pieces.data(), pieces.size()}, blocks.data(), {arena.data(), block_bytes}, slots.data(), pairs);
    for (std::size_t j = 0; j < pairs; ++j) {
        const u8* at = arena.data() + j * block_bytes;
        for (std::size_t r = 0; r < pieces.size(); ++r) {
            const std::size_t piece = std::size_t(pieces[r]);
            assert(std::memcmp(at, memory[r].data() + std::size_t(blocks[j]) * piece, piece) == 0);
            at += piece;
        }
    }
    scatter({back_addresses.data(), pieces.data(), pieces.size()}, blocks.data(), {arena.data(), block_bytes}, slots.data(), pairs);
    assert(back == memory);
}

void nothing_to_copy_is_fine() {
    World world;
    gather(world.regions(), nullptr, world.slots(), nullptr, 0);
    scatter(world.regions(), nullptr, world.slots(), nullptr, 0);
    touch(nullptr, 0);
}

void touch_reaches_every_page_and_stays_inside() {
    std::vector<u8> memory(4096 * 3 + 10, kUntouched);
    touch(memory.data(), memory.size());
    std::size_t zeros = 0;
    for (const u8 byte : memory) zeros += byte == 0;
    assert(memory[0] == 0 && memory[4096] == 0 && memory[8192] == 0 && memory[12288] == 0 && memory.back() == 0);
    assert(zeros == 5);
}

void patterns_tell_blocks_apart() {
    World world;
    u8 keys[2][32] = {};
    keys[1][31] = 1;  // the last bit of a key counts
    fill_block(world.regions(), 0, keys[0]);
    fill_block(world.regions(), 1, keys[1]);
    assert(check_block(world.regions(), 0, keys[0]) && check_block(world.regions(), 1, keys[1]));
    assert(!check_block(world.regions(), 0, keys[1]) && !check_block(world.regions(), 1, keys[0]));
    // A pattern depends on the key, not on the block's position.
    fill_block(world.regions(), 2, keys[0]);
    for (std::size_t r = 0; r < world.pieces.size(); ++r) {
        const std::size_t piece = std::size_t(world.pieces[r]);
        assert(piece == 0 || std::memcmp(world.memory[r].data(), world.memory[r].data() + 2 * piece, piece) == 0);
        for (std::size_t i = 3 * piece; i < world.memory[r].size(); ++i) assert(world.memory[r][i] == kUntouched);
    }
    // It depends on the region too.
    assert(std::memcmp(world.memory[0].data(), world.memory[4].data(), 8) != 0);
}

void every_byte_is_checked() {
    World world;
    const u8 key[32] = {9};
    fill_block(world.regions(), 2, key);
    for (std::size_t r = 0; r < world.pieces.size(); ++r) {
        const std::size_t piece = std::size_t(world.pieces[r]);
        for (std::size_t i = 0; i < piece; ++i)
            for (int bit = 0; bit < 8; ++bit) {
                world.memory[r][2 * piece + i] ^= u8(1 << bit);
                assert(!check_block(world.regions(), 2, key));
                world.memory[r][2 * piece + i] ^= u8(1 << bit);
            }
    }
    assert(check_block(world.regions(), 2, key));
}

}  // namespace

int main() {
    gather_lays_the_pieces_one_after_another();
    scatter_is_the_inverse();
    a_large_batch_arrives_whole();
    nothing_to_copy_is_fine();
    touch_reaches_every_page_and_stays_inside();
    patterns_tell_blocks_apart();
    every_byte_is_checked();
    std::puts("copy: ok");
}
