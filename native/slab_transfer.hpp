// Moving runs of slots between a slab and memory, with their checksums and table entries. Blocks.
#pragma once

#include "slab_queue.hpp"

namespace kvactors {

// Aligned memory of a thread, for memory that direct I/O cannot move.
class Bounce {
public:
    ~Bounce();
    // Null if there is no memory.
    u8* get(std::size_t bytes);

private:
    u8* memory_ = nullptr;
    std::size_t bytes_ = 0;
};

void read_run(SlabJob& job, u32 first, u32 count, const SlabCalls& calls, Bounce& bounce);
void write_run(SlabJob& job, u32 first, u32 count, const SlabCalls& calls, Bounce& bounce);

}  // namespace kvactors
