// The slab queue under the address and undefined-behaviour sanitizers: batches in both directions,
// checksums, cancelled jobs, a queue that is dropped while a thread hangs.
#include "../slab_queue.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../xxh3.hpp"

#undef NDEBUG
#include <cassert>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

using namespace kvactors;

namespace {

constexpr std::size_t kSize = 5000, kStride = 8192, kEntry = 192, kSlots = 64;

struct World {
    std::string folder, table_path;
    int table, slab;
    u8* memory;
    World() {
        char name[] = "/tmp/slab-queue-XXXXXX";
        folder = mkdtemp(name);
        table_path = folder + "/table";
        table = open(table_path.c_str(), O_RDWR | O_CREAT, 0600);
        slab = open((folder + "/slab-0000").c_str(), O_RDWR | O_CREAT, 0600);
        assert(ftruncate(slab, kStride * kSlots) == 0);
        memory = static_cast<u8*>(std::aligned_alloc(4096, kStride * kSlots));
        std::mt19937 noise(3);
        for (std::size_t i = 0; i < kStride * kSlots; ++i) memory[i] = u8(noise());
    }
    ~World() {
        close(table);
        close(slab);
        std::free(memory);
        unlink(table_path.c_str());
        unlink((folder + "/slab-0000").c_str());
        rmdir(folder.c_str());
    }
    void bind(SlabQueue& queue) const {
        struct stat state;
        assert(fstat(table, &state) == 0);
        queue.files = {-1, table, table_path, i64(state.st_ino), O_RDWR, kSize, kStride, kEntry, kSlots};
        queue.files.folder = open(folder.c_str(), O_RDONLY | O_DIRECTORY);
    }
    SlabItem item(i64 slot, bool held = true, bool whole = true) const {
        return {held ? slab : -1, whole, slot, memory + std::size_t(slot) * kStride};
    }
};

std::vector<SlabQueue::Ended> drained(SlabQueue& queue) {
    assert(queue.wait_idle(60));
    return queue.take_ended();
}

void moves_and_verifies(const World& world, bool held, bool whole) {
    SlabQueue queue(3, 2, 0);
    world.bind(queue);
    std::vector<SlabItem> items;
    for (i64 slot = 0; slot < i64(kSlots); slot += slot % 7 == 6 ? 2 : 1) items.push_back(world.item(slot, held, whole));
    queue.submit(SlabWork::kWrite, false, items, std::string(kEntry * items.size(), 'x'));
    auto ended = drained(queue);
    assert(ended.size() == 1);
    std::string marks;
    for (std::size_t i = 0; i < items.size(); ++i) {
        assert(ended[0].outcomes[i] == kDone);
        const std::string entry = ended[0].records.substr(i * kEntry, kEntry);
        u64 sum;
        std::memcpy(&sum, entry.data() + 88, 8);
        assert(sum == xxh3_64_plain(items[i].memory, kSize));
        assert(pwrite(world.table, entry.data(), kEntry, 4096 + i64(kEntry) * items[i].slot) == i64(kEntry));
        marks += entry.substr(88, 8) + entry.substr(kEntry - 8);
    }
    marks[16 * 5] = char(marks[16 * 5] ^ 1);
    for (int round = 0; round < 20; ++round) queue.submit(SlabWork::kRead, false, items, marks);
    queue.submit(SlabWork::kRead, false, {}, "");
    std::size_t seen = 0;
    for (const auto& one : drained(queue)) {
        ++seen;
        for (std::size_t i = 0; i < one.outcomes.size(); ++i) assert(one.outcomes[i] == (i == 5 ? kCorrupt : kDone));
    }
    assert(seen == 21 && queue.in_flight() == 0);
    close(queue.files.folder);
    queue.stop();
    assert(queue.finish(60) && queue.event_fd() == -1);
}

std::atomic<bool> g_go{false}, g_begun{false};

i64 hanging(int, const iovec*, int, i64) {
    g_begun = true;
    while (!g_go.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return -5;
}

void outlives_its_queue(const World& world) {
    auto queue = std::make_unique<SlabQueue>(1, 1, 0);
    world.bind(*queue);
    queue->set_calls({kSystemCalls.read, hanging, kSystemCalls.inode});
    queue->submit(SlabWork::kWrite, false, {world.item(0)}, std::string(kEntry, 'x'));
    const u64 second = queue->submit(SlabWork::kWrite, false, {world.item(9)}, std::string(kEntry, 'x'));
    while (!g_begun.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    queue->cancel(second);
    assert(!queue->wait_idle(0.01) && queue->in_flight() == 2);
    queue->stop();
    assert(!queue->finish(0.01));
    close(queue->files.folder);
    queue.reset();
    g_go = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
}

}  // namespace

int main() {
    for (std::size_t size : {0, 3, 8, 16, 17, 128, 129, 240, 241, 1024, 1025, 4097}) {
        const std::string data(size, 'k');
        const u8* const bytes = reinterpret_cast<const u8*>(data.data());
        assert(xxh3_64(bytes, size) == xxh3_64_plain(bytes, size));
    }
    const World world;
    for (const bool held : {true, false})
        for (const bool whole : {true, false}) moves_and_verifies(world, held, whole);
    outlives_its_queue(world);
    std::puts("ok");
}
