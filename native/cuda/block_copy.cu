// Copies between scattered device blocks and host slots, in both directions, by the GPU itself.
//
// Device side: piece p's region is laid out [block][bytes]. Host side: slot s starts at
// slots + s * stride, and piece p lies `offset` bytes behind that. A warp moves one tile, the piece
// p of the pair j, at a time, and goes through the tiles in steps of the grid. The grid may have
// any size, and a small one leaves the other multiprocessors to the model. A tile is moved by a
// warp, not by a block of threads, because the pieces are small: 32 lanes of 16 bytes with four
// loads in flight each take 2 KiB.
//
// The host checks ids, sizes and addresses. The kernel checks nothing. With KVACTORS_EMULATED the
// same source is C++ for any compiler: see emulation.hpp.
#ifdef KVACTORS_EMULATED
#include "emulation.hpp"
#endif

namespace kvactors_cuda {

typedef long long i64;

// One row of the table, in the layout's contract order.
struct Piece {
    i64 region;  // address
    i64 bytes;
    i64 offset;  // within the slot
};

constexpr unsigned kWarp = 32;
constexpr unsigned kInFlight = 4;

// A stream's bytes are read once and written once, so neither cache should keep them.
__device__ __forceinline__ void move_vectors(uint4* to, const uint4* from, i64 vectors, unsigned lane) {
#pragma unroll 1
    for (i64 i = lane; i < vectors; i += kInFlight * kWarp) {
        uint4 part[kInFlight];
#pragma unroll
        for (unsigned k = 0; k < kInFlight; ++k)
            if (i + k * kWarp < vectors) part[k] = __ldcs(from + i + k * kWarp);
#pragma unroll
        for (unsigned k = 0; k < kInFlight; ++k)
            if (i + k * kWarp < vectors) __stcs(to + i + k * kWarp, part[k]);
    }
}

__device__ __forceinline__ void move_tile(i64 to, i64 from, i64 bytes, unsigned lane) {
    i64 done = 0;
    if (((to | from) & 15) == 0) {  // a vector access elsewhere traps
        const i64 vectors = bytes >> 4;
        move_vectors(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4*>(from), vectors, lane);
        done = vectors << 4;
    }
    unsigned char* target = reinterpret_cast<unsigned char*>(to);
    const unsigned char* source = reinterpret_cast<const unsigned char*>(from);
#pragma unroll 1
    for (i64 i = done + lane; i < bytes; i += kWarp) target[i] = source[i];
}

template <bool kToSlots>
__device__ __forceinline__ void move_pairs(const Piece* table, i64 pieces, const i64* blocks, const i64* ids, i64 pairs,
                                           i64 slots, i64 stride) {
    const unsigned lane = threadIdx.x % kWarp;
    const i64 warps = blockDim.x / kWarp;
    const i64 tiles = pairs * pieces;
    for (i64 t = blockIdx.x * warps + threadIdx.x / kWarp; t < tiles; t += gridDim.x * warps) {
        const i64 j = t / pieces;
        const Piece piece = table[t - j * pieces];
        const i64 on_device = piece.region + blocks[j] * piece.bytes;
        const i64 on_host = slots + ids[j] * stride + piece.offset;
        if (kToSlots)
            move_tile(on_host, on_device, piece.bytes, lane);
        else
            move_tile(on_device, on_host, piece.bytes, lane);
    }
}

}  // namespace kvactors_cuda

// table: `pieces` rows. blocks, ids: `pairs` of each. slots: the arena's address as the device sees
// it. stride: bytes. blockDim.x: a multiple of 32, at most 256.
extern "C" __global__ void __launch_bounds__(256)
    kvactors_gather(const kvactors_cuda::Piece* table, long long pieces, const long long* blocks, const long long* ids,
                    long long pairs, long long slots, long long stride) {
    kvactors_cuda::move_pairs<true>(table, pieces, blocks, ids, pairs, slots, stride);
}

extern "C" __global__ void __launch_bounds__(256)
    kvactors_scatter(const kvactors_cuda::Piece* table, long long pieces, const long long* blocks, const long long* ids,
                     long long pairs, long long slots, long long stride) {
    kvactors_cuda::move_pairs<false>(table, pieces, blocks, ids, pairs, slots, stride);
}
