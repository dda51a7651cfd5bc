// What block_copy.cu takes from CUDA, for an ordinary C++ compiler: its threads are played one after another.
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

struct alignas(16) uint4 {  // the alignment is what makes UBSan see an access that would trap on a GPU
    unsigned x, y, z, w;
};
inline uint4 __ldcs(const uint4* from) { return *from; }
inline void __stcs(uint4* to, uint4 value) { *to = value; }

// Runs a kernel's every thread; the order of blocks is turned around, since nothing may depend on it.
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
