// Reads and writes of the slots of a file store in threads of their own: payload, checksum and table
// entry in one step, many slots a job, and the writes of the table. No thread here needs an
// interpreter or an event loop.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "copy_queue.hpp"

namespace kvactors {

// The system calls of the threads, so that a test can put faults in their place. Each returns the
// result, or the negative error number.
struct SlabCalls {
    i64 (*read)(int fd, const iovec* parts, int count, i64 at);
    i64 (*write)(int fd, const iovec* parts, int count, i64 at);
    i64 (*inode)(const char* path);  // 0: there is no such file
    i64 (*sync)(int fd);
};

extern const SlabCalls kSystemCalls;

struct SlabFiles {
    int folder = -1, table = -1;
    std::string table_path;
    i64 table_inode = 0;  // the folder was deleted or moved if another one is at the path
    int flags = 0;        // for slabs without a held descriptor
    std::size_t size = 0, stride = 1, entry_bytes = 0, slots_per_slab = 1;
};

// Outcomes of an object. Negative: an error number.
constexpr i32 kDone = 0, kCorrupt = 1, kMissing = 2, kNotBegun = 3;

struct SlabItem {
    int fd;  // of the slab, -1: open it for the call
    bool whole;  // the memory is aligned, and a whole stride of it belongs to the slot
    i64 slot;
    u8* memory;
};

// What a job does with its slots. `kSeal` writes their entries, `kErase` writes zeros there.
enum class SlabWork { kRead, kWrite, kSeal, kErase };

struct SlabJob {
    u64 number = 0;
    SlabWork work = SlabWork::kRead;
    bool direct = false;
    bool sync = false;  // kSeal: payloads and entries are on the device when the job has ended
    SlabFiles files;
    std::vector<SlabItem> items;
    // Read: per object the checksum of its payload and the last 8 bytes of its entry. Written: its
    // whole entry, in which the checksums are filled in. Sealed: its whole entry.
    std::string records;
    std::vector<i32> outcomes;
    std::vector<std::pair<u32, u32>> runs;  // first item and number of items
    std::atomic<u32> next_run{0}, left{0};
    std::atomic<bool> cancelled{false}, ended{false};
    SlabJob* next = nullptr;  // in the queue of ended jobs
};

// One thread at a time calls the methods, in Python the one that has the GIL. `wait_idle` and
// `finish` are exceptions: they may run beside the others.
class SlabQueue {
public:
    struct Ended {
        u64 number;
        std::vector<i32> outcomes;
        std::string records;
    };

    SlabQueue(unsigned read_threads, unsigned write_threads, int niceness);
    ~SlabQueue();
    SlabQueue(const SlabQueue&) = delete;
    SlabQueue& operator=(const SlabQueue&) = delete;

    SlabFiles files;  // of the jobs that follow

    u64 submit(SlabWork work, bool direct, std::vector<SlabItem> items, std::string records, bool sync = false);
    // The jobs that have ended and were not returned before, in the order of their ends.
    std::vector<Ended> take_ended();
    // The runs of a job that no thread has begun are not begun any more.
    void cancel(u64 number);
    // Whether no job is in flight, after `seconds` at most. Returned jobs and others count alike.
    bool wait_idle(double seconds);
    // Refuse further jobs. The threads end after the submitted ones.
    void stop();
    // After `stop`: whether every thread has ended, after `seconds` at most. The event is closed
    // then. Threads that hang keep what they need, and end by themselves.
    bool finish(double seconds);

    std::size_t in_flight() const;
    int event_fd() const;
    void set_calls(const SlabCalls& calls);
    bool is_forked() const;

private:
    struct Token;
    struct Worker;
    struct Shared;
    struct Pool {
        unsigned threads;
        unsigned turn = 0;
        std::vector<std::shared_ptr<Worker>> workers;
    };

    static void run(const std::shared_ptr<Shared>& shared, Worker& worker);
    void deal(Pool& pool, const std::shared_ptr<SlabJob>& job);

    std::shared_ptr<Shared> shared_;
    Pool pools_[3];  // reads, writes, and the table
    std::unordered_map<u64, std::shared_ptr<SlabJob>> jobs_;  // not returned yet
    u64 last_ = 0;
    int niceness_;
    int process_ = 0;
    bool stopped_ = false;
};

}  // namespace kvactors
