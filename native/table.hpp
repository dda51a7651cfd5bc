// Open addressing from a 32-bit hash to a node id, with linear probing and deletion by shifting
// back. The hash is kept beside the id: a probe over another entry reads no node, and growing rehashes
// nothing.
//
// The table grows in steps: each insertion moves a few entries of the array before, so that none takes
// time in proportion to the size. The smaller array is read until it is empty.
#pragma once

#include "common.hpp"
#include "zeroed.hpp"

namespace kvactors {

class Table {
public:
    explicit Table(std::size_t capacity, bool touch = true, bool huge = false)
        : slots_(slots_for(capacity), huge), mask_(u32(slots_.size() - 1)) {
        if (touch) slots_.touch();
    }

    template <class Same>
    u32 find(u32 hash, Same same) const {
        for (u32 i = hash & mask_; slots_[i].place != 0; i = (i + 1) & mask_)
            if (slots_[i].hash == hash && same(slots_[i].place - 1)) return slots_[i].place - 1;
        return old_.size() == 0 ? kNil : find_old(hash, same);
    }

    void prefetch(u32 hash) const { __builtin_prefetch(&slots_[hash & mask_], 1); }

    // `id` must not be in the table.
    void insert(u32 hash, u32 id) {
        if ((used_ + 1) * 4 > slots_.size() * 3) grow();
        for (unsigned i = 0; i < kMoves && old_.size() != 0; ++i) move();
        place({hash, id + 1});
        ++used_;
    }

    // `id` must be in the table.
    void erase(u32 hash, u32 id) {
        --used_;
        u32 hole = hash & mask_;
        while (slots_[hole].place != id + 1) {
            if (slots_[hole].place == 0) return erase_old(hash, id);
            hole = (hole + 1) & mask_;
        }
        for (u32 i = hole;;) {
            i = (i + 1) & mask_;
            if (slots_[i].place == 0) break;
            const u32 from_home = (i - slots_[i].hash) & mask_;
            if (from_home < ((i - hole) & mask_)) continue;  // it would move before its home slot
            slots_[hole] = slots_[i];
            hole = i;
        }
        slots_[hole].place = 0;
    }

    // Frees the memory. False if there is none. No find or insert may follow.
    bool drop() {
        if (slots_.size() == 0) return false;
        slots_ = Zeroed<Entry>();
        finish_move();
        used_ = 0;
        return true;
    }

    std::size_t used() const { return used_; }
    std::size_t bytes() const { return (slots_.size() + old_.size()) * sizeof(Entry); }

private:
    struct Entry {
        u32 hash;
        u32 place;  // id + 1, or 0 where there is none, so that zeroed memory is an empty table
    };
    static constexpr u32 kErased = 0xffffffffu;  // a place in the smaller array
    // Slots that an insertion moves. All are moved long before the next growth.
    static constexpr unsigned kMoves = 8;

    static std::size_t slots_for(std::size_t entries) {
        std::size_t slots = 16;
        while (slots * 3 < entries * 4 + 4) slots *= 2;
        return slots;
    }

    void place(Entry entry) {
        u32 i = entry.hash & mask_;
        while (slots_[i].place != 0) i = (i + 1) & mask_;
        slots_[i] = entry;
    }

    // The slots before `moved_` are copies of entries that were moved.
    template <class Same>
    u32 find_old(u32 hash, Same same) const {
        const u32 mask = u32(old_.size() - 1);
        for (u32 i = hash & mask; old_[i].place != 0; i = (i + 1) & mask)
            if (i >= moved_ && old_[i].hash == hash && old_[i].place != kErased && same(old_[i].place - 1)) return old_[i].place - 1;
        return kNil;
    }

    void erase_old(u32 hash, u32 id) {
        const u32 mask = u32(old_.size() - 1);
        u32 i = hash & mask;
        while (old_[i].place != id + 1) i = (i + 1) & mask;
        old_[i].place = kErased;  // a probe goes on here
    }

    void grow() {
        while (old_.size() != 0) move();
        Zeroed<Entry> slots(slots_.size() * 2);
        old_.swap(slots_);
        slots_.swap(slots);
        mask_ = u32(slots_.size() - 1);
        moved_ = 0;
    }

    void move() {
        const Entry entry = old_[moved_++];
        if (entry.place != 0 && entry.place != kErased) place(entry);
        if (moved_ == old_.size()) finish_move();
    }

    void finish_move() {
        old_ = Zeroed<Entry>();
        moved_ = 0;
    }

    Zeroed<Entry> slots_, old_;  // old_: the array before the last growth, until its entries are moved
    u32 mask_ = 0, moved_ = 0;
    std::size_t used_ = 0;
};

}  // namespace kvactors
