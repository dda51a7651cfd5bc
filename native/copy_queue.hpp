// Copies between device blocks and host slots in threads of their own, and the queue of those that
// have ended. No thread here needs an interpreter or an event loop.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <unordered_map>
#include <vector>

#include "copy_core.hpp"

namespace kvactors {

// A word that threads wait on until it changes (a futex).
class Signal {
public:
    u32 value() const { return word_.load(); }
    void change();
    // Returns when the word is not `seen` any more, or after `seconds`. May return earlier.
    void wait(u32 seen, double seconds);

private:
    std::atomic<u32> word_{0};
    std::atomic<u32> waiters_{0};
};

struct CopyJob {
    u64 number;
    bool to_host;
    std::vector<i64> blocks, slots;
    std::chrono::steady_clock::time_point began;
    double seconds = 0;
    std::atomic<u32> pieces{0};  // not copied yet
    std::atomic<bool> ended{false};
    CopyJob* next = nullptr;  // in the queue of ended jobs
};

// One thread at a time calls the methods, in Python the one that has the GIL. `wait` is the
// exception: any number of threads may be in it.
class CopyQueue {
public:
    struct Ended {
        u64 number;
        std::size_t bytes;
        double seconds;
    };

    // addresses, piece_bytes, strides: of the device's regions. inline_bytes: smaller jobs are
    // copied by the thread that submits them.
    CopyQueue(std::vector<i64> addresses, std::vector<i64> piece_bytes, std::vector<i64> strides, Slots slots,
              unsigned threads, std::size_t inline_bytes);
    ~CopyQueue();
    CopyQueue(const CopyQueue&) = delete;
    CopyQueue& operator=(const CopyQueue&) = delete;

    // The numbers have been checked. Returns the job's number.
    u64 submit(bool to_host, std::vector<i64> blocks, std::vector<i64> slots);
    // The jobs that have ended and were not returned before, in the order of their ends.
    std::vector<Ended> take_ended();
    // A job that was not returned by `take_ended`; null if there is none.
    std::shared_ptr<CopyJob> find(u64 number) const;
    // Whether the job has ended, after `seconds` at most.
    bool wait(const CopyJob& job, double seconds);
    std::size_t in_flight() const { return jobs_.size(); }
    bool is_forked() const;
    // Refuse further jobs. Returns whether this was the first call.
    bool stop();
    // After `stop`: wait for the threads, which end after the submitted jobs. Runs in one thread,
    // and other threads may call the other methods at the same time.
    void join();

private:
    struct Piece {
        std::shared_ptr<CopyJob> job;
        std::size_t first = 0, count = 0;
        std::atomic<Piece*> next{nullptr};
    };
    // A queue with one producer (the submitting thread) and one consumer (the worker's).
    struct Worker {
        Piece* head;                // the consumer's: the piece before the next one
        Piece* tail;                // the producer's: the last piece
        Signal signal;
        std::thread thread;
        Worker() : head(new Piece), tail(head) {}
        ~Worker();
    };

    void start();
    void run(Worker& worker);
    void copy(const CopyJob& job, std::size_t first, std::size_t count) const;
    void end(CopyJob& job);

    const std::vector<i64> addresses_, piece_bytes_, strides_;
    const Slots slots_;
    const unsigned threads_;
    const std::size_t inline_bytes_;
    std::size_t block_bytes_ = 0;
    std::vector<std::unique_ptr<Worker>> workers_;
    std::unordered_map<u64, std::shared_ptr<CopyJob>> jobs_;  // not returned yet
    std::atomic<CopyJob*> ended_{nullptr};                    // the last one first
    Signal changed_;                                          // a job has ended
    std::atomic<bool> stopping_{false};
    u64 last_ = 0;
    unsigned turn_ = 0;
    int process_ = 0;
    bool closed_ = false;
};

}  // namespace kvactors
