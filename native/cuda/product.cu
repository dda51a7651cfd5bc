// A plain matrix product that keeps every multiprocessor busy, for the benchmark of copies beside a model's work.
// With KVACTORS_EMULATED the same source is C++ for any compiler: see emulation.hpp.
#ifdef KVACTORS_EMULATED
#include "emulation.hpp"
namespace kvactors_cuda {
#endif

// c = a * b, three n by n matrices. Any grid, blockDim.x at most 256.
extern "C" __global__ void __launch_bounds__(256) kvactors_product(const float* a, const float* b, float* c, long long n) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n * n; i += step) {
        const long long row = i / n, column = i - row * n;
        float sum = 0;
#pragma unroll 8
        for (long long k = 0; k < n; ++k) sum += a[row * n + k] * b[k * n + column];
        c[i] = sum;
    }
}

#ifdef KVACTORS_EMULATED
}  // namespace kvactors_cuda
#endif
