// The GPU's copy kernels, with every thread run on the CPU under the address and
// undefined-behaviour sanitizers.
#define KVACTORS_EMULATED
#include "../cuda/block_copy.cu"

#undef NDEBUG
#include <cassert>
#include <cstdio>
#include <vector>

using kvactors_cuda::i64;
using kvactors_cuda::Piece;
using kvactors_cuda::play;

namespace {

typedef unsigned char u8;
constexpr u8 kUntouched = 0xee;

i64 address(const u8* memory) { return reinterpret_cast<i64>(memory); }

// Regions begin `shift` bytes off an address that is a multiple of 16. Each has its own allocation,
// so that the sanitizer reports any access outside it.
struct World {
    std::vector<i64> pieces;
    i64 blocks, slots_count, stride, block_bytes = 0, shift;
    std::vector<std::vector<u8>> memory;
    std::vector<Piece> table;
    std::vector<u8> arena;

    World(std::vector<i64> sizes, i64 blocks, i64 slots, i64 gap, i64 shift)
        : pieces(std::move(sizes)), blocks(blocks), slots_count(slots), shift(shift) {
        for (const i64 piece : pieces) {
            memory.emplace_back(std::size_t(piece * blocks + shift), kUntouched);
            table.push_back({address(memory.back().data()) + shift, piece, block_bytes});
            block_bytes += piece;
        }
        stride = block_bytes + gap;
        arena.assign(std::size_t(stride * slots), kUntouched);
    }
    static u8 pattern(std::size_t r, i64 i) { return u8(r * 67 + std::size_t(i) * 2654435761u % 251); }
    void fill_device() {
        for (std::size_t r = 0; r < memory.size(); ++r)
            for (i64 i = 0; i < pieces[r] * blocks; ++i) memory[r][std::size_t(shift + i)] = pattern(r, i);
    }
    void run(bool to_slots, const std::vector<i64>& ids, const std::vector<i64>& slots, unsigned grid, unsigned threads) {
        play(to_slots ? kvactors_gather : kvactors_scatter, grid, threads, table.data(), i64(table.size()), ids.data(),
             slots.data(), i64(ids.size()), address(arena.data()), stride);
    }
};

void round_trip(const std::vector<i64>& pieces, i64 gap, i64 shift, unsigned grid, unsigned threads) {
    World from(pieces, 6, 7, gap, shift), to(pieces, 6, 7, gap, shift);
    from.fill_device();
    const std::vector<i64> ids{4, 0, 5}, slots{1, 6, 0}, others{0, 1, 3};
    from.run(true, ids, slots, grid, threads);
    std::vector<u8> expected(from.arena.size(), kUntouched);
    for (std::size_t j = 0; j < ids.size(); ++j)
        for (std::size_t r = 0; r < pieces.size(); ++r)
            for (i64 i = 0; i < pieces[r]; ++i)
                expected[std::size_t(slots[j] * from.stride + from.table[r].offset + i)] =
                    World::pattern(r, ids[j] * pieces[r] + i);
    assert(from.arena == expected);  // the gaps and the other slots included
    to.arena = from.arena;
    to.run(false, others, slots, grid, threads);
    for (std::size_t r = 0; r < pieces.size(); ++r) {
        std::vector<u8> region(to.memory[r].size(), kUntouched);
        for (std::size_t j = 0; j < ids.size(); ++j)
            for (i64 i = 0; i < pieces[r]; ++i)
                region[std::size_t(shift + others[j] * pieces[r] + i)] = World::pattern(r, ids[j] * pieces[r] + i);
        assert(to.memory[r] == region);
    }
}

void whatever_the_sizes_and_the_alignment() {
    const std::vector<std::vector<i64>> sizes{{1024, 1024}, {16, 2048, 4096 + 16}, {1000, 24, 64}, {1, 13, 0, 4099}, {6560, 1320}};
    for (const auto& pieces : sizes)
        for (const i64 gap : {0, 3, 4096})
            for (const i64 shift : {0, 1, 8, 16}) round_trip(pieces, gap, shift, 2, 64);
}

void whatever_the_grid() {
    for (const unsigned grid : {1u, 3u, 40u})
        for (const unsigned threads : {32u, 96u, 256u}) round_trip({1024, 100, 4096}, 0, 0, grid, threads);
}

void nothing_to_copy_touches_nothing() {
    World world({64, 16}, 2, 2, 0, 0);
    world.run(true, {}, {}, 2, 64);
    world.table.clear();
    world.run(true, {0}, {1}, 2, 64);
    for (const u8 byte : world.arena) assert(byte == kUntouched);
}

}  // namespace

int main() {
    whatever_the_sizes_and_the_alignment();
    whatever_the_grid();
    nothing_to_copy_touches_nothing();
    std::puts("block_copy: ok");
    return 0;
}
