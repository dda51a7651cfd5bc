#include "slab_queue.hpp"

#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "give_way.hpp"
#include "slab_transfer.hpp"

namespace kvactors {
namespace {

// Slots that follow each other on the disk are moved by one call, up to so many bytes.
constexpr std::size_t kRunBytes = std::size_t(256) << 10;
constexpr std::size_t kRunItems = 256;

// Threads of the table. Its jobs are short unless they wait for the device.
constexpr unsigned kTableThreads = 4;

std::vector<std::pair<u32, u32>> runs_of(const std::vector<SlabItem>& items, const SlabFiles& files) {
    std::vector<std::pair<u32, u32>> runs;
    const std::size_t most = std::min(kRunItems, std::max<std::size_t>(1, kRunBytes / files.stride));
    for (std::size_t i = 0; i < items.size(); ++i) {
        if (!runs.empty() && runs.back().second < most) {
            const SlabItem& before = items[i - 1];
            const i64 slabs = i64(files.slots_per_slab);
            if (items[i].slot == before.slot + 1 && items[i].slot % slabs != 0 && items[i].whole && before.whole &&
                items[i].fd == before.fd) {
                ++runs.back().second;
                continue;
            }
        }
        runs.emplace_back(u32(i), 1);
    }
    return runs;
}

}  // namespace

struct SlabQueue::Token {
    std::shared_ptr<SlabJob> job;
    std::atomic<Token*> next{nullptr};
};

// A queue with one producer (the submitting thread) and one consumer (the worker's).
struct SlabQueue::Worker {
    Token* head;  // the consumer's: the token before the next one
    Token* tail;  // the producer's: the last token
    Signal signal;
    std::atomic<bool> idle{false};
    Worker() : head(new Token), tail(head) {}
    ~Worker() {
        while (head != nullptr) {
            Token* const next = head->next.load();
            delete head;
            head = next;
        }
    }
    void add(const std::shared_ptr<SlabJob>& job) {
        auto token = std::make_unique<Token>();
        token->job = job;
        Token* const added = token.release();
        Token* const before = tail;
        tail = added;
        before->next.store(added);
        signal.change();
    }
};

// Outlives the queue while a thread hangs.
struct SlabQueue::Shared {
    std::atomic<SlabJob*> ended{nullptr};  // the last one first
    std::atomic<u32> running{0}, threads{0};
    std::atomic<bool> stopping{false};
    std::atomic<i64 (*)(int, const iovec*, int, i64)> read{kSystemCalls.read}, write{kSystemCalls.write};
    std::atomic<i64 (*)(const char*)> inode{kSystemCalls.inode};
    std::atomic<i64 (*)(int)> sync{kSystemCalls.sync};
    Signal changed;  // a job or a thread has ended
    int event_fd = -1;
    ~Shared() {
        if (event_fd >= 0) ::close(event_fd);
    }

    void end(SlabJob& job) {
        SlabJob* last = ended.load();
        do {
            job.next = last;
        } while (!ended.compare_exchange_weak(last, &job));
        running.fetch_sub(1);
        changed.change();
        if (last != nullptr) return;  // the reader of the event has yet to take that one
        const u64 one = 1;
        if (::write(event_fd, &one, sizeof one) < 0) return;  // the counter is full: readable already
    }
};

SlabQueue::SlabQueue(unsigned read_threads, unsigned write_threads, int niceness)
    : shared_(std::make_shared<Shared>()), niceness_(niceness) {
    pools_[0].threads = read_threads;
    pools_[1].threads = write_threads;
    pools_[2].threads = kTableThreads;
    shared_->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (shared_->event_fd < 0) throw std::runtime_error("no eventfd can be had");
}

SlabQueue::~SlabQueue() {
    stop();
    if (is_forked())
        for (Pool& pool : pools_)  // this process never had the threads, their tokens are the parent's
            for (auto& worker : pool.workers) new std::shared_ptr<Worker>(worker);
}

bool SlabQueue::is_forked() const { return process_ != 0 && process_ != int(getpid()); }

std::size_t SlabQueue::in_flight() const { return shared_->running.load(); }

int SlabQueue::event_fd() const { return shared_->event_fd; }

void SlabQueue::set_calls(const SlabCalls& calls) {
    shared_->read.store(calls.read);
    shared_->write.store(calls.write);
    shared_->inode.store(calls.inode);
    shared_->sync.store(calls.sync);
}

u64 SlabQueue::submit(SlabWork work, bool direct, std::vector<SlabItem> items, std::string records, bool sync) {
    if (stopped_) throw std::runtime_error("the slab queue is closed");
    if (is_forked()) throw std::runtime_error("the slab queue was used before a fork: make another one in the child");
    process_ = int(getpid());
    const auto job = std::make_shared<SlabJob>();
    job->number = ++last_;
    job->work = work;
    job->direct = direct;
    job->sync = sync;
    job->files = files;
    job->records = std::move(records);
    job->outcomes.assign(items.size(), kNotBegun);
    const bool table = work == SlabWork::kSeal || work == SlabWork::kErase;
    if (!table)
        job->runs = runs_of(items, files);
    else if (!items.empty())
        job->runs.emplace_back(0, u32(items.size()));  // in one step
    job->items = std::move(items);
    job->left = u32(job->runs.size());
    jobs_[job->number] = job;
    shared_->running.fetch_add(1);
    if (job->runs.empty())
        shared_->end(*job);
    else
        deal(pools_[table ? 2 : work == SlabWork::kWrite ? 1 : 0], job);
    return job->number;
}

// Idle threads get the job first. If they are fewer than its runs, every other thread gets it too,
// so that a run never waits for a particular thread.
void SlabQueue::deal(Pool& pool, const std::shared_ptr<SlabJob>& job) {
    std::size_t wanted = job->runs.size();
    std::vector<Worker*> busy;
    for (std::size_t i = 0; i < pool.workers.size() && wanted > 0; ++i) {
        Worker& worker = *pool.workers[(pool.turn + i) % pool.workers.size()];
        if (!worker.idle.exchange(false)) {
            busy.push_back(&worker);
            continue;
        }
        worker.add(job);
        --wanted;
    }
    ++pool.turn;
    for (; wanted > 0 && pool.workers.size() < pool.threads; --wanted) {
        auto worker = std::make_shared<Worker>();
        worker->add(job);
        shared_->threads.fetch_add(1);
        try {
            std::thread([shared = shared_, worker, niceness = niceness_] {
                setpriority(PRIO_PROCESS, id_t(syscall(SYS_gettid)), niceness);
                work_in_background();
                run(shared, *worker);
                shared->threads.fetch_sub(1);
                shared->changed.change();
            }).detach();
        } catch (const std::system_error&) {
            shared_->threads.fetch_sub(1);
            if (!pool.workers.empty()) break;
            jobs_.erase(job->number);
            shared_->running.fetch_sub(1);
            throw std::runtime_error("no thread can be had");
        }
        pool.workers.push_back(std::move(worker));
    }
    if (wanted > 0)
        for (Worker* worker : busy) worker->add(job);
}

void SlabQueue::run(const std::shared_ptr<Shared>& shared, Worker& worker) {
    Bounce bounce;
    for (;;) {
        const u32 seen = worker.signal.value();
        Token* const token = worker.head->next.load();
        if (token == nullptr) {
            if (shared->stopping.load()) return;
            worker.idle.store(true);
            worker.signal.wait(seen, 3600);
            continue;
        }
        worker.idle.store(false);
        delete worker.head;
        worker.head = token;
        const std::shared_ptr<SlabJob> job = std::move(token->job);
        for (u32 i; (i = job->next_run.fetch_add(1)) < job->runs.size();) {
            if (!job->cancelled.load()) {
                const SlabCalls calls{shared->read.load(), shared->write.load(), shared->inode.load(),
                                      shared->sync.load()};
                const auto [first, count] = job->runs[i];
                if (job->work == SlabWork::kRead)
                    read_run(*job, first, count, calls, bounce);
                else if (job->work == SlabWork::kWrite)
                    write_run(*job, first, count, calls, bounce);
                else
                    write_table(*job, calls);
            }
            if (job->left.fetch_sub(1) == 1) shared->end(*job);
        }
    }
}

std::vector<SlabQueue::Ended> SlabQueue::take_ended() {
    u64 count;
    if (::read(shared_->event_fd, &count, sizeof count) < 0) count = 0;  // nothing was signalled
    std::vector<Ended> found;
    for (SlabJob* job = shared_->ended.exchange(nullptr); job != nullptr;) {
        SlabJob* const next = job->next;
        found.push_back({job->number, std::move(job->outcomes), std::move(job->records)});
        jobs_.erase(job->number);  // a thread that has just ended it holds it too
        job = next;
    }
    std::reverse(found.begin(), found.end());
    return found;
}

void SlabQueue::cancel(u64 number) {
    const auto found = jobs_.find(number);
    if (found != jobs_.end()) found->second->cancelled.store(true);
}

bool SlabQueue::wait_idle(double seconds) {
    const auto shared = shared_;
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::min(seconds, 1e6));
    for (;;) {
        const u32 seen = shared->changed.value();
        if (shared->running.load() == 0) return true;
        const double left = std::chrono::duration<double>(until - std::chrono::steady_clock::now()).count();
        if (left <= 0) return false;
        shared->changed.wait(seen, left);
    }
}

void SlabQueue::stop() {
    if (stopped_) return;
    stopped_ = true;
    if (is_forked()) return;
    shared_->stopping.store(true);
    for (Pool& pool : pools_)
        for (auto& worker : pool.workers) worker->signal.change();
}

bool SlabQueue::finish(double seconds) {
    const auto shared = shared_;
    if (is_forked()) return true;
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::min(seconds, 1e6));
    for (;;) {
        const u32 seen = shared->changed.value();
        if (shared->threads.load() == 0) {
            // A thread that has just ended may keep `shared` for a moment, but not the event.
            if (shared->event_fd >= 0) ::close(shared->event_fd);
            shared->event_fd = -1;
            return true;
        }
        const double left = std::chrono::duration<double>(until - std::chrono::steady_clock::now()).count();
        if (left <= 0) return false;
        shared->changed.wait(seen, left);
    }
}

}  // namespace kvactors
