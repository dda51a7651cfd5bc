// The copy queue under the address and undefined-behaviour sanitizers: jobs of every size, and
// waits in other threads.
#include "../copy_queue.hpp"

#undef NDEBUG
#include <cassert>
#include <cstdio>
#include <random>

using namespace kvactors;

namespace {

constexpr i64 kBlocks = 24;
constexpr i64 kRow = 160, kPieces[] = {100, 33};
constexpr std::size_t kSlot = 133;

struct World {
    std::vector<u8> first, second, rows;
    World() : first(kBlocks * 128), second(kBlocks * 33), rows(kBlocks * kRow) {
        std::mt19937 noise(7);
        for (auto* memory : {&first, &second})
            for (u8& byte : *memory) byte = u8(noise());
    }
    CopyQueue make(unsigned threads, std::size_t inline_bytes) {
        return CopyQueue({reinterpret_cast<i64>(first.data()), reinterpret_cast<i64>(second.data())},
                         {kPieces[0], kPieces[1]}, {128, 33}, Slots{rows.data(), kRow, 1, kSlot}, threads, inline_bytes);
    }
    bool same(i64 block, i64 slot) const {
        const u8* row = rows.data() + slot * kRow;
        return std::memcmp(row, first.data() + block * 128, 100) == 0 &&
               std::memcmp(row + 100, second.data() + block * 33, 33) == 0;
    }
};

void run(unsigned threads, std::size_t inline_bytes) {
    World world;
    CopyQueue queue = world.make(threads, inline_bytes);
    std::mt19937 noise(threads);
    std::size_t ended = 0, submitted = 0;
    for (int round = 0; round < 200; ++round) {
        std::vector<std::thread> waiting;
        std::vector<std::vector<i64>> parts(3);  // jobs in flight at the same time share no slot
        for (i64 i = 0; i < kBlocks; ++i)
            if (const auto part = noise() % 4; part < 3) parts[part].push_back(i);
        for (const auto& blocks : parts) {
            const u64 number = queue.submit(true, blocks, blocks);
            ++submitted;
            const auto job = queue.find(number);
            assert(job != nullptr);
            waiting.emplace_back([&queue, job] { assert(queue.wait(*job, 60)); });
        }
        ended += queue.take_ended().size();
        for (auto& one : waiting) one.join();
    }
    std::vector<i64> all, reversed;
    for (i64 i = 0; i < kBlocks; ++i) all.push_back(i), reversed.push_back(kBlocks - 1 - i);
    const u64 last = queue.submit(true, all, reversed);
    while (ended < submitted + 1) {
        if (const auto job = queue.find(last)) assert(queue.wait(*job, 60));
        ended += queue.take_ended().size();
    }
    assert(queue.in_flight() == 0);
    for (i64 i = 0; i < kBlocks; ++i) assert(world.same(i, kBlocks - 1 - i));
    const auto absent = queue.find(last);
    assert(absent == nullptr);
}

}  // namespace

int main() {
    run(1, 0);
    run(3, 0);
    run(2, 1000);
    std::puts("copy queue ok");
}
