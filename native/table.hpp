// Open addressing from a 32-bit hash to a node id, with linear probing and deletion by shifting
// back (no tombstones). The hash is kept beside the id: a probe over another entry reads no node,
// and growing rehashes nothing.
#pragma once

#include "common.hpp"
#include "zeroed.hpp"

namespace kvactors {

class Table {
public:
    explicit Table(std::size_t capacity, bool touch = true) {
        rebuild(slots_for(capacity));
        if (touch) slots_.touch();
    }

    template <class Same>
    u32 find(u32 hash, Same same) const {
        for (u32 i = hash & mask_;; i = (i + 1) & mask_) {
            const Entry& entry = slots_[i];
            if (entry.place == 0) return kNil;
            if (entry.hash == hash && same(entry.place - 1)) return entry.place - 1;
        }
    }

    void prefetch(u32 hash) const { __builtin_prefetch(&slots_[hash & mask_], 1); }

    // `id` must not be in the table.
    void insert(u32 hash, u32 id) {
        if ((used_ + 1) * 4 > slots_.size() * 3) rebuild(slots_.size() * 2);
        place({hash, id + 1});
        ++used_;
    }

    // `id` must be in the table.
    void erase(u32 hash, u32 id) {
        u32 hole = hash & mask_;
        while (slots_[hole].place != id + 1) hole = (hole + 1) & mask_;
        for (u32 i = hole;;) {
            i = (i + 1) & mask_;
            if (slots_[i].place == 0) break;
            const u32 from_home = (i - slots_[i].hash) & mask_;
            if (from_home < ((i - hole) & mask_)) continue;  // it would move before its home slot
            slots_[hole] = slots_[i];
            hole = i;
        }
        slots_[hole].place = 0;
        --used_;
    }

    void reserve(std::size_t entries) {
        if (slots_for(entries) > slots_.size()) rebuild(slots_for(entries));
    }

    // Frees the memory. False if there is none. No find or insert may follow.
    bool drop() {
        if (slots_.size() == 0) return false;
        slots_ = Zeroed<Entry>();
        used_ = 0;
        return true;
    }

    std::size_t used() const { return used_; }
    std::size_t bytes() const { return slots_.size() * sizeof(Entry); }

private:
    struct Entry {
        u32 hash;
        u32 place;  // id + 1, or 0 where there is none, so that zeroed memory is an empty table
    };

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

    void rebuild(std::size_t slots) {
        Zeroed<Entry> old(slots);
        old.swap(slots_);
        mask_ = u32(slots - 1);
        for (std::size_t i = 0; i < old.size(); ++i)
            if (old[i].place != 0) place(old[i]);
    }

    Zeroed<Entry> slots_;
    u32 mask_ = 0;
    std::size_t used_ = 0;
};

}  // namespace kvactors
