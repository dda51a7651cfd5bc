// Threads of low priority let others run between pieces of long work.
//
// A thread that becomes runnable does not always interrupt one of lower priority on its processor:
// Linux lets the running one complete its slice of some milliseconds (RUN_TO_PARITY, since 6.6), and
// a thread that slept for long may interrupt one of higher priority. An event loop would wait for
// whole batches of copies and checksums, on a machine that has a processor free.
#pragma once

#include <algorithm>
#include <chrono>

#include "common.hpp"

namespace kvactors {

// When a thread gives way: after some work, and the less often the longer others keep the processor.
// An event loop's pass is short. Programs that compute take whole slices of 1 to 12 ms each time.
class GiveWay {
public:
    using Time = std::chrono::steady_clock::time_point;
    using Span = std::chrono::nanoseconds;

    // The thread has worked on so many bytes. Whether it should give way, if the time agrees.
    bool is_due(std::size_t bytes) {
        if ((done_ += bytes) < kEvery) return false;
        done_ = 0;
        return true;
    }
    bool may(Time now) const { return now >= not_before_; }
    // Others ran between the two times. The thread works for longer than that next, unless it was short.
    void gave(Time began, Time ended) {
        const Span gone = std::min<Span>(ended - began, kLongest);
        not_before_ = ended + std::min<Span>(gone * gone.count() / kShort.count(), kLongest);
    }

private:
    static constexpr std::size_t kEvery = std::size_t(256) << 10;  // 20 to 50 us of a copy
    static constexpr Span kShort = std::chrono::microseconds(500), kLongest = std::chrono::seconds(1);

    std::size_t done_ = 0;
    Time not_before_{};
};

// The calling thread gives way from now on. Other threads, as that of an event loop, never do.
void work_in_background();

// Called between pieces of work: the thread has worked on so many bytes.
void give_way(std::size_t bytes);

}  // namespace kvactors
