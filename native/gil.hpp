// Releasing the GIL so that a daemon thread may outlive the interpreter.
#pragma once

#include <Python.h>

#if defined(__GLIBCXX__) || __has_include(<cxxabi.h>)
#include <cxxabi.h>
#define KVACTORS_FORCED_UNWIND 1
#endif

#include <chrono>
#include <thread>

namespace kvactors {

// Releases the GIL for a scope.
//
// Before Python 3.14 a thread that asks for the GIL while the interpreter finalizes is ended with
// pthread_exit. The unwinding would reach a noexcept function (nanobind's dispatcher, destructors)
// and abort the whole process. The thread stops here instead, as Python 3.14 does it, and ends with
// the process.
class ReleasedGil {
public:
    ReleasedGil() : state_(PyEval_SaveThread()) {}
    ~ReleasedGil() {
#ifdef KVACTORS_FORCED_UNWIND
        try {
            PyEval_RestoreThread(state_);
        } catch (abi::__forced_unwind&) {
            for (;;) std::this_thread::sleep_for(std::chrono::hours(24));
        }
#else
        PyEval_RestoreThread(state_);
#endif
    }
    ReleasedGil(const ReleasedGil&) = delete;
    ReleasedGil& operator=(const ReleasedGil&) = delete;

private:
    PyThreadState* state_;
};

}  // namespace kvactors
