// Free device blocks 0 .. total - 1: the lowest first, later the one returned last.
//
// A block may have several owners: paths that a fork has made of one, a copy in flight, and the tree
// once one of the paths has committed it. Each returns it once, and it is free with the last.
#pragma once

#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "common.hpp"

namespace kvactors {

class BlockPool {
public:
    explicit BlockPool(u32 total) : is_free_(total, 1) {
        for (u32 block = total; block-- > 0;) free_.push_back(block);
    }

    std::size_t total() const { return is_free_.size(); }
    std::size_t free() const { return free_.size(); }
    std::size_t shared() const { return owners_.size(); }
    u32 owners(u32 block) const {
        const auto others = owners_.find(block);
        return others != owners_.end() ? 1 + others->second : 1 - is_free_.at(block);
    }

    std::vector<u32> take(std::size_t count) {
        if (count > free_.size()) throw std::runtime_error(std::to_string(count) + " blocks wanted, " + std::to_string(free_.size()) + " free");
        const std::vector<u32> taken(free_.rbegin(), free_.rbegin() + std::ptrdiff_t(count));
        free_.resize(free_.size() - count);
        for (const u32 block : taken) is_free_[block] = 0;
        return taken;
    }

    // One more owner.
    void share(u32 block) {
        if (is_free_.at(block) != 0) throw std::runtime_error("block " + std::to_string(block) + " is free, and gets an owner");
        ++owners_[block];
    }

    // One owner fewer. A block that is free and in use would mean wrong bytes.
    void give(u32 block) {
        if (block >= total()) throw std::runtime_error("block " + std::to_string(block) + " is not of this pool");
        if (is_free_[block] != 0) throw std::runtime_error("block " + std::to_string(block) + " was released twice");
        if (!owners_.empty()) {
            const auto others = owners_.find(block);
            if (others != owners_.end()) {
                if (--others->second == 0) owners_.erase(others);
                return;
            }
        }
        is_free_[block] = 1;
        free_.push_back(block);
    }

    void check() const {
        std::vector<u8> listed(total(), 0);
        for (const u32 block : free_) listed[block] += 1;
        bool good = listed == is_free_;
        for (const auto& [block, others] : owners_) good = good && is_free_[block] == 0 && others != 0;
        if (!good) throw std::runtime_error("free list, marks and owners of device blocks disagree");
    }

private:
    std::vector<u32> free_;
    std::vector<u8> is_free_;
    std::unordered_map<u32, u32> owners_;  // beyond the first
};

}  // namespace kvactors
