// Rows of equal width in chunks that never move: growing copies nothing and rows keep their
// address.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>

#include "zeroed.hpp"

namespace kvactors {

// kWidth: the width where it is known here, 0 elsewhere.
template <class T, std::size_t kWidth = 0>
class Slab {
public:
    Slab(std::size_t width, unsigned shift) : width_(width), shift_(shift), mask_((u32(1) << shift) - 1) {}

    T* row(u32 id) { return chunks_[id >> shift_].get() + (id & mask_) * width(); }
    const T* row(u32 id) const { return chunks_[id >> shift_].get() + (id & mask_) * width(); }

    // Rows one after another: the chunk is looked up only where an id lies in another one. In a loop
    // that writes to rows a compiler would read the slab's own members again for each.
    class Cursor {
    public:
        explicit Cursor(Slab& slab) : slab_(slab), width_(slab.width()), shift_(slab.shift_), mask_(slab.mask_) {}
        T& operator[](u32 id) {
            if (id >> shift_ != chunk_) {
                chunk_ = id >> shift_;
                first_ = slab_.chunks_[chunk_].get();
            }
            return first_[(id & mask_) * (kWidth != 0 ? kWidth : width_)];
        }

    private:
        Slab& slab_;
        const std::size_t width_;
        const unsigned shift_;
        const u32 mask_;
        u32 chunk_ = 0xffffffffu;
        T* first_ = nullptr;
    };
    Cursor cursor() { return Cursor(*this); }

    // Rows from this one to the end of its chunk, which lie side by side.
    u32 rows_beside(u32 id) const { return mask_ + 1 - (id & mask_); }

    std::size_t rows() const { return chunks_.size() << shift_; }
    std::size_t bytes() const { return rows() * width() * sizeof(T); }

    // touch: bring in the pages of these rows now, and not during the first request. Chunks that fill
    // huge pages ask for such, since a walk over a large tree would otherwise miss the TLB at each 4 KiB.
    void reserve(std::size_t rows_wanted, bool touch = true) {
        const std::size_t row_bytes = width() * sizeof(T), chunk_bytes = (row_bytes << shift_) + 63 & ~std::size_t(63);
        const bool huge = touch && chunk_bytes % kHugePage == 0;
        while (rows() < rows_wanted) {
            void* memory = std::aligned_alloc(huge ? kHugePage : 64, chunk_bytes);
            if (memory == nullptr) throw std::bad_alloc();
            if (huge) ::madvise(memory, chunk_bytes, MADV_HUGEPAGE);  // no effect where the system has none
            if (touch) std::memset(memory, 0, std::min(chunk_bytes, (rows_wanted - rows()) * row_bytes));
            chunks_.emplace_back(static_cast<T*>(memory));
        }
    }

    // Frees the last chunk. False if there is none.
    bool drop() {
        if (chunks_.empty()) return false;
        chunks_.pop_back();
        return true;
    }

private:
    std::size_t width() const { return kWidth != 0 ? kWidth : width_; }

    struct Free {
        void operator()(T* p) const { std::free(p); }
    };
    std::size_t width_;
    unsigned shift_;
    u32 mask_;
    std::vector<std::unique_ptr<T, Free>> chunks_;
};

}  // namespace kvactors
