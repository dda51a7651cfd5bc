#include "copy_queue.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>
#include <stdexcept>

namespace kvactors {
namespace {

// A part of a job is worth a thread's while from this size on.
constexpr std::size_t kPieceBytes = std::size_t(1) << 20;

constexpr double kLongWait = 3600;

void futex(std::atomic<u32>& word, int what, u32 value, const timespec* limit) {
    syscall(SYS_futex, reinterpret_cast<u32*>(&word), what, value, limit, nullptr, 0);
}

}  // namespace

void Signal::change() {
    word_.fetch_add(1);
    // A waiter counts itself before it compares the word, so either it is seen here, or it sees the
    // change.
    if (waiters_.load() != 0) futex(word_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr);
}

void Signal::wait(u32 seen, double seconds) {
    const double whole = std::min(std::max(seconds, 0.0), kLongWait);
    timespec limit;
    limit.tv_sec = time_t(whole);
    limit.tv_nsec = long((whole - double(limit.tv_sec)) * 1e9);
    waiters_.fetch_add(1);
    futex(word_, FUTEX_WAIT_PRIVATE, seen, &limit);
    waiters_.fetch_sub(1);
}

CopyQueue::Worker::~Worker() {
    while (head != nullptr) {
        Piece* const next = head->next.load();
        delete head;
        head = next;
    }
}

CopyQueue::CopyQueue(std::vector<i64> addresses, std::vector<i64> piece_bytes, std::vector<i64> strides, Slots slots,
                     unsigned threads, std::size_t inline_bytes)
    : addresses_(std::move(addresses)), piece_bytes_(std::move(piece_bytes)), strides_(std::move(strides)),
      slots_(slots), threads_(threads), inline_bytes_(inline_bytes) {
    for (const i64 bytes : piece_bytes_) block_bytes_ += std::size_t(bytes);
}

CopyQueue::~CopyQueue() {
    if (stop()) join();
}

bool CopyQueue::is_forked() const { return process_ != 0 && process_ != int(getpid()); }

void CopyQueue::start() {
    process_ = int(getpid());
    for (unsigned i = 0; i < threads_; ++i) {
        workers_.push_back(std::make_unique<Worker>());
        Worker& worker = *workers_.back();
        worker.thread = std::thread([this, &worker] { run(worker); });
    }
}

u64 CopyQueue::submit(bool to_host, std::vector<i64> blocks, std::vector<i64> slots) {
    if (closed_) throw std::runtime_error("the copy queue is closed");
    if (is_forked()) throw std::runtime_error("the copy queue was used before a fork: make another one in the child");
    const auto job = std::make_shared<CopyJob>();
    job->number = ++last_;
    job->to_host = to_host;
    job->blocks = std::move(blocks);
    job->slots = std::move(slots);
    job->began = std::chrono::steady_clock::now();
    jobs_[job->number] = job;
    const std::size_t pairs = job->blocks.size();
    if (pairs * block_bytes_ <= inline_bytes_) {
        copy(*job, 0, pairs);
        end(*job);
        return job->number;
    }
    if (workers_.empty()) start();
    const std::size_t least = std::max<std::size_t>(1, kPieceBytes / std::max<std::size_t>(1, block_bytes_));
    const std::size_t step = std::max(least, (pairs + threads_ - 1) / threads_);
    const std::size_t pieces = (pairs + step - 1) / step;
    job->pieces = u32(pieces);
    for (std::size_t i = 0; i < pieces; ++i) {
        Worker& worker = *workers_[turn_++ % threads_];
        auto piece = std::make_unique<Piece>();
        piece->job = job;
        piece->first = i * step;
        piece->count = std::min(step, pairs - i * step);
        Piece* const added = piece.release();
        Piece* const before = worker.tail;
        worker.tail = added;
        before->next.store(added);
        worker.signal.change();
    }
    return job->number;
}

void CopyQueue::run(Worker& worker) {
    for (;;) {
        const u32 seen = worker.signal.value();
        Piece* const piece = worker.head->next.load();
        if (piece == nullptr) {
            if (stopping_.load()) return;
            worker.signal.wait(seen, kLongWait);
            continue;
        }
        delete worker.head;
        worker.head = piece;
        const std::shared_ptr<CopyJob> job = std::move(piece->job);
        copy(*job, piece->first, piece->count);
        if (job->pieces.fetch_sub(1) == 1) end(*job);
    }
}

void CopyQueue::copy(const CopyJob& job, std::size_t first, std::size_t count) const {
    const Regions device{addresses_.data(), piece_bytes_.data(), addresses_.size(), strides_.data()};
    (job.to_host ? gather : scatter)(device, job.blocks.data() + first, slots_, job.slots.data() + first, count);
}

void CopyQueue::end(CopyJob& job) {
    job.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - job.began).count();
    CopyJob* last = ended_.load();
    do {
        job.next = last;
    } while (!ended_.compare_exchange_weak(last, &job));
    job.ended.store(true);
    changed_.change();
}

std::vector<CopyQueue::Ended> CopyQueue::take_ended() {
    std::vector<Ended> found;
    for (CopyJob* job = ended_.exchange(nullptr); job != nullptr;) {
        found.push_back({job->number, job->blocks.size() * block_bytes_, job->seconds});
        CopyJob* const next = job->next;
        jobs_.erase(job->number);  // a worker that has just ended it holds it too
        job = next;
    }
    std::reverse(found.begin(), found.end());
    return found;
}

std::shared_ptr<CopyJob> CopyQueue::find(u64 number) const {
    const auto found = jobs_.find(number);
    return found == jobs_.end() ? nullptr : found->second;
}

bool CopyQueue::wait(const CopyJob& job, double seconds) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::min(seconds, kLongWait));
    for (;;) {
        const u32 seen = changed_.value();
        if (job.ended.load()) return true;
        const double left = std::chrono::duration<double>(until - std::chrono::steady_clock::now()).count();
        if (left <= 0) return false;
        changed_.wait(seen, left);
    }
}

bool CopyQueue::stop() {
    if (closed_) return false;
    closed_ = true;
    return true;
}

void CopyQueue::join() {
    if (is_forked()) {
        // This process never had the threads: no call may be made for them, not even detach.
        for (auto& worker : workers_) static_cast<void>(worker.release());
        return;
    }
    stopping_.store(true);
    for (auto& worker : workers_) worker->signal.change();
    for (auto& worker : workers_) worker->thread.join();
}

}  // namespace kvactors
