// When a thread gives way, by the bytes it has worked on and by how long others kept the processor.
#include "../give_way.hpp"

#undef NDEBUG
#include <cassert>
#include <cstdio>
#include <thread>

using namespace kvactors;
using namespace std::chrono_literals;

namespace {

constexpr std::size_t kKiB = 1024;
using Time = GiveWay::Time;

void after_some_work() {
    GiveWay state;
    for (int round = 0; round < 3; ++round) {
        assert(!state.is_due(100 * kKiB));
        assert(!state.is_due(100 * kKiB));
        assert(state.is_due(56 * kKiB));
    }
    assert(state.is_due(8192 * kKiB));
    assert(!state.is_due(0));
}

// The time for which a thread works on, after others have kept the processor for `gone`.
GiveWay::Span rest(GiveWay::Span gone) {
    GiveWay state;
    const Time began{1h}, ended = began + gone;
    assert(state.may(began));
    state.gave(began, ended);
    GiveWay::Span least = 0ns, most = 1h;  // may not, may
    if (state.may(ended)) return 0ns;
    while (most - least > 1us) {
        const GiveWay::Span middle = (least + most) / 2;
        (state.may(ended + middle) ? most : least) = middle;
    }
    return most;
}

void less_often_on_a_busy_machine() {
    assert(rest(0ns) == 0ns);
    assert(rest(100us) <= 25us);                      // a pass of a loop
    assert(rest(500us) >= 490us && rest(500us) <= 510us);
    assert(rest(1ms) >= 2 * 990us);                   // the slices of a program that computes
    assert(rest(4ms) >= 8 * 3990us);
    assert(rest(12ms) >= 24 * 11990us);
    assert(rest(10s) <= 1001ms && rest(1h) <= 1001ms);  // and never for long
    for (GiveWay::Span gone = 1us; gone < 20ms; gone += 37us) assert(rest(gone) <= rest(gone + 37us) + 2us);
}

// Calls in any thread return, in one of the background or not.
void any_thread() {
    give_way(1 << 30);
    std::thread([] {
        work_in_background();
        for (int i = 0; i < 1000; ++i) give_way(1 << 20);
    }).join();
}

}  // namespace

int main() {
    after_some_work();
    less_often_on_a_busy_machine();
    any_thread();
    std::puts("ok");
}
