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
// Writes the entries of all objects, or zeros in their places. They share one outcome. Entries of
// slots that follow each other are one call.
void write_table(SlabJob& job, const SlabCalls& calls);

}  // namespace kvactors
