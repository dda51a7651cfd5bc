// The hashes and tokens of the flush notifier's blocks, by row. Rows rise from 1; the caller chooses
// them, and keeps everything else that it knows of a block in arrays by row.
#pragma once

#include <memory>
#include <stdexcept>
#include <vector>

#include "table.hpp"

namespace kvactors {

class BlockRows {
public:
    explicit BlockRows(std::size_t token_bytes) : token_bytes_(token_bytes), size_(sizeof(Key) + token_bytes), table_(0) {}

    std::size_t token_bytes() const { return token_bytes_; }
    std::size_t used() const { return table_.used(); }

    // 0 if no row has the hash.
    u32 find(const Key& hash) const {
        const u32 row = table_.find(start_of(hash), [&](u32 at) { return key(at) == hash; });
        return row == kNil ? 0 : row;
    }

    void put(u32 row, const Key& hash, const u8* tokens) {
        if (row == 0 || row / kPart > parts_.size()) throw std::out_of_range("rows are taken one after the other");
        if (find(hash) != 0) throw std::invalid_argument("a row has this hash");
        if (row / kPart == parts_.size()) parts_.push_back(std::make_unique<u8[]>(kPart * size_));
        std::memcpy(at(row), hash.bytes, sizeof(Key));
        std::memcpy(at(row) + sizeof(Key), tokens, token_bytes_);
        table_.insert(start_of(hash), row);
    }

    // The row must have been put. Its bytes can be read until it is put again.
    void erase(u32 row) { table_.erase(start_of(key(row)), row); }

    bool holds(u32 row) const { return row != 0 && row / kPart < parts_.size() && find(key(row)) == row; }
    const u8* hash(u32 row) const { return known(row); }
    const u8* tokens(u32 row) const { return known(row) + sizeof(Key); }

private:
    static constexpr u32 kPart = 1024;  // rows in one piece of memory: growing moves none

    static u32 start_of(const Key& hash) {
        u32 start;
        std::memcpy(&start, hash.bytes, sizeof start);
        return start;
    }
    u8* at(u32 row) const { return parts_[row / kPart].get() + row % kPart * size_; }
    const Key& key(u32 row) const { return *reinterpret_cast<const Key*>(at(row)); }
    const u8* known(u32 row) const {
        if (row / kPart >= parts_.size()) throw std::out_of_range("no such row");
        return at(row);
    }

    const std::size_t token_bytes_, size_;
    std::vector<std::unique_ptr<u8[]>> parts_{};
    Table table_;
};

}  // namespace kvactors
