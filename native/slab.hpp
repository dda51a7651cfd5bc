// Rows of equal width in chunks that never move: growing copies nothing and rows keep their
// address.
#pragma once

#include <cstdlib>

#include "common.hpp"

namespace kvactors {

template <class T>
class Slab {
public:
    Slab(std::size_t width, unsigned shift) : width_(width), shift_(shift), mask_((u32(1) << shift) - 1) {}

    T* row(u32 id) { return chunks_[id >> shift_].get() + (id & mask_) * width_; }
    const T* row(u32 id) const { return chunks_[id >> shift_].get() + (id & mask_) * width_; }

    // Rows from this one to the end of its chunk, which lie side by side.
    u32 rows_beside(u32 id) const { return mask_ + 1 - (id & mask_); }

    std::size_t rows() const { return chunks_.size() << shift_; }
    std::size_t bytes() const { return rows() * width_ * sizeof(T); }

    void reserve(std::size_t rows_wanted, bool touch = true) {
        const std::size_t chunk_bytes = ((width_ * sizeof(T)) << shift_) + 63 & ~std::size_t(63);
        while (rows() < rows_wanted) {
            void* memory = std::aligned_alloc(64, chunk_bytes);
            if (memory == nullptr) throw std::bad_alloc();
            // Bring the pages in now, not during the first request.
            if (touch) std::memset(memory, 0, chunk_bytes);
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
    struct Free {
        void operator()(T* p) const { std::free(p); }
    };
    std::size_t width_;
    unsigned shift_;
    u32 mask_;
    std::vector<std::unique_ptr<T, Free>> chunks_;
};

}  // namespace kvactors
