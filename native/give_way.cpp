#include "give_way.hpp"

#include <sched.h>

namespace kvactors {
namespace {

thread_local bool t_background = false;
thread_local GiveWay t_state;

}  // namespace

void work_in_background() { t_background = true; }

void give_way(std::size_t bytes) {
    if (!t_background || !t_state.is_due(bytes)) return;
    const auto began = std::chrono::steady_clock::now();
    if (!t_state.may(began)) return;
    sched_yield();
    t_state.gave(began, std::chrono::steady_clock::now());
}

}  // namespace kvactors
