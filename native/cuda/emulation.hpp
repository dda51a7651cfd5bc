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
inline uint4 __ldcs(const uint4* from) { return *from; }
inline void __stcs(uint4* to, uint4 value) { *to = value; }

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
