// The parts of CUDA that block_copy.cu uses, for an ordinary C++ compiler. Threads run one after
// another.
#pragma once

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)

namespace kvactors_cuda {

struct Index {
    unsigned x;
};
inline thread_local Index threadIdx{0}, blockIdx{0}, blockDim{32}, gridDim{1};

// The alignment makes UBSan report an access that would trap on a GPU.
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

// Whether a vector access since the flag was cleared would have trapped on a GPU.
inline thread_local bool misaligned = false;
inline void check_vector(const void* at) { misaligned |= reinterpret_cast<unsigned long long>(at) % sizeof(uint4) != 0; }
inline uint4 __ldcs(const uint4* from) {
    check_vector(from);
    uint4 value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}
inline void __stcs(uint4* to, uint4 value) {
    check_vector(to);
    __builtin_memcpy(to, &value, sizeof value);
}

// Runs every thread of a kernel. The order of blocks is reversed, since nothing may depend on it.
template <class Kernel, class... Args>
void play(Kernel kernel, unsigned grid, unsigned threads, Args... args) {
    gridDim.x = grid;
    blockDim.x = threads;
    for (unsigned block = grid; block-- > 0;)
        for (unsigned thread = 0; thread < threads; ++thread) {
            blockIdx.x = block;
            threadIdx.x = thread;
            kernel(args...);
        }
}

}  // namespace kvactors_cuda
