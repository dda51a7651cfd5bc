// Numbers of the elements of an array that are in use or free. Each number taken is the next free
// one after that taken before, so that elements made one after another lie one after another.
#pragma once

#include <vector>

#include "common.hpp"

namespace kvactors {

class Places {
public:
    // The array grows to `size` elements before a number is used again.
    explicit Places(std::size_t size) : least_(size) { free_.reserve(size / 64 + 1); }

    u32 take() {
        if (count_ == 0 || size_ < least_) {
            if (size_ % 64 == 0) free_.push_back(0);
            return u32(size_++);
        }
        std::size_t word = at_ / 64;
        u64 bits = free_[word] & ~u64(0) << at_ % 64;  // those before `at_` come last
        while (bits == 0) {
            word = word + 1 == free_.size() ? 0 : word + 1;
            bits = free_[word];
        }
        const u32 taken = u32(word * 64) + u32(__builtin_ctzll(bits));
        free_[word] &= ~(u64(1) << taken % 64);
        at_ = (std::size_t(taken) + 1) % size_;
        --count_;
        return taken;
    }

    void give(u32 place) {
        free_[place / 64] |= u64(1) << place % 64;
        ++count_;
    }

    std::size_t size() const { return size_; }
    std::size_t used() const { return size_ - count_; }
    std::size_t bytes() const { return free_.capacity() * sizeof(u64); }

private:
    std::vector<u64> free_;
    std::size_t least_, size_ = 0, count_ = 0, at_ = 0;
};

}  // namespace kvactors
