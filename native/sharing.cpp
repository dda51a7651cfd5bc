// Salts, quotas, priorities and times to live of the blocks of a tree.
#include "sharing.hpp"

#include <algorithm>
#include <utility>

namespace kvactors {
namespace {

constexpr unsigned kSharingShift = 12;

}  // namespace

Sharing::Sharing(std::size_t capacity) : rows_(1, kSharingShift) {
    rows_.reserve(capacity, false);
    owner_of(0);
}

// ---------------------------------------------------------------- nodes and their owners

void Sharing::add(u32 id, u32 at) {
    if (id >= rows_.rows()) rows_.reserve(std::size_t(id) + 1, false);
    Row& added = row(id);
    added = Row{};
    added.owner = at;
    added.before = added.after = added.place = kNil;
    added.own = added.level = u8(kPlainLevel);
    added.expiry = added.expires = kNever;
    added.floor_expiry = -kNever;
    ++owners_[at].nodes;
}

void Sharing::remove(u32 id) {
    const u32 at = row(id).owner;
    Owner& owner = owners_[at];
    if (--owner.nodes != 0 || at == 0) return;
    if (!owner.cleared && (owner.counted || quotas_.count(owner.salt) != 0)) return;
    if (owner.above) settle(at);
    if (!owner.cleared) by_salt_.erase(owner.salt);
    free_owner(at);
}

void Sharing::free_owner(u32 at) {
    owners_[at].used = owners_[at].cleared = false;
    owners_[at].roots.clear();
    free_.push_back(at);
}

u32 Sharing::clear(u64 salt) {
    const u32 at = find_owner(salt);
    if (at == kNil || owners_[at].nodes == 0) return kNil;
    by_salt_.erase(salt);
    owners_[at].cleared = true;
    owners_[at].quota = kUnlimited;
    settle(at);
    if (!owners_[at].counted && quotas_.count(salt) == 0) return at;
    const u32 next = owner_of(salt);  // its counts stay
    owners_[next].counted = std::exchange(owners_[at].counted, false);
    owners_[next].evicted = owners_[at].evicted;
    return at;
}

void Sharing::add_root(u32 id, u32 at) {
    if (id >= rows_.rows()) rows_.reserve(std::size_t(id) + 1, false);
    std::vector<u32>& roots = owners_[at].roots;
    if (std::find(roots.begin(), roots.end(), id) != roots.end()) return;
    row(id).owner = at;
    roots.push_back(id);
}

void Sharing::remove_root(u32 id) {
    std::vector<u32>& roots = owners_[row(id).owner].roots;
    roots.erase(std::remove(roots.begin(), roots.end(), id), roots.end());
}

u32 Sharing::find_owner(u64 salt) const {
    const auto found = by_salt_.find(salt);
    return found == by_salt_.end() ? kNil : found->second;
}

// The record of a salt without blocks is dropped: there may be any number of salts.
u32 Sharing::owner_of(u64 salt) {
    const auto found = by_salt_.find(salt);
    if (found != by_salt_.end()) return found->second;
    u32 at = u32(owners_.size());
    if (free_.empty()) {
        owners_.emplace_back();
    } else {
        at = free_.back();
        free_.pop_back();
        owners_[at] = Owner{};
    }
    Owner& owner = owners_[at];
    owner.salt = salt;
    owner.used = true;
    std::fill_n(owner.head, kLevels, kNil);
    std::fill_n(owner.tail, kLevels, kNil);
    renew(owner);
    by_salt_.emplace(salt, at);
    return at;
}

void Sharing::count_quota(u32 id) {
    ++quota_evictions_;
    Owner& owner = owners_[row(id).owner];
    const bool stays = owner.counted || quotas_.count(owner.salt) != 0;
    if (!stays && counted_ < kCounted) owner.counted = true, ++counted_;
    if (stays || owner.counted) ++owner.evicted;
}

void Sharing::changed(u32 at, int by) {
    owners_[at].resident += u64(std::int64_t(by));
    settle(at);
}

// Whether the owner is above its quota and has evictable blocks may have changed.
void Sharing::settle(u32 at) {
    Owner& owner = owners_[at];
    const bool above = owner.resident > owner.quota && owner.evictable != 0;
    if (above == owner.above) return;
    owner.above = above;
    if (above) {
        owner.before = above_last_;
        owner.after = kNil;
        (above_last_ == kNil ? above_first_ : owners_[above_last_].after) = at;
        above_last_ = at;
    } else {
        (owner.before == kNil ? above_first_ : owners_[owner.before].after) = owner.after;
        (owner.after == kNil ? above_last_ : owners_[owner.after].before) = owner.before;
    }
}

void Sharing::renew(Owner& owner) {
    const auto named = quotas_.find(owner.salt);
    owner.quota = named == quotas_.end() ? default_ : named->second;
}

void Sharing::set_default(u64 quota) {
    default_ = quota;
    for (const auto& [salt, at] : by_salt_) renew(owners_[at]), settle(at);
}

void Sharing::set_quota(u64 salt, u64 quota) {
    quotas_[salt] = quota;
    const u32 at = find_owner(salt);
    if (at != kNil) renew(owners_[at]), settle(at);
}

void Sharing::reset_quota(u64 salt) {
    quotas_.erase(salt);
    const u32 at = find_owner(salt);
    if (at != kNil) renew(owners_[at]), settle(at);
}

// ---------------------------------------------------------------- the lists

void Sharing::hint(u32 id, u32 level, double expiry) {
    row(id).own = u8(level);
    row(id).expiry = expiry;
}

// A block that has others below it keeps the highest level, and the latest expiry, that one of them
// was listed with. The floor ends with the last of them.
u32 Sharing::list(u32 id, u32 parent, bool parent_is_root, bool children) {
    Row& listed = row(id);
    if (!children) listed.floor = 0, listed.floor_expiry = -kNever;
    listed.level = std::max(listed.own, listed.floor);
    listed.expires = std::max(listed.expiry, listed.floor_expiry);
    if (!parent_is_root) {
        Row& above = row(parent);
        above.floor = std::max(above.floor, listed.level);
        above.floor_expiry = std::max(above.floor_expiry, listed.expires);
    }
    listed.order = ++order_;
    Owner& owner = owners_[listed.owner];
    u32 &head = owner.head[listed.level], &tail = owner.tail[listed.level];
    listed.before = tail;
    listed.after = kNil;
    (tail == kNil ? head : row(tail).after) = id;
    tail = id;
    ++owner.evictable;
    settle(listed.owner);
    if (listed.expires != kNever) {
        heap_.push_back(id);
        listed.place = u32(heap_.size() - 1);
        sift_up(listed.place);
    }
    return listed.level;
}

u32 Sharing::unlist(u32 id) {
    Row& gone = row(id);
    Owner& owner = owners_[gone.owner];
    (gone.before == kNil ? owner.head[gone.level] : row(gone.before).after) = gone.after;
    (gone.after == kNil ? owner.tail[gone.level] : row(gone.after).before) = gone.before;
    --owner.evictable;
    settle(gone.owner);
    if (gone.place != kNil) {
        const u32 place = gone.place, last = heap_.back();
        heap_.pop_back();
        gone.place = kNil;
        if (last != id) {
            heap_put(place, last);
            sift_up(place);
            sift_down(row(last).place);
        }
    }
    return gone.level;
}

// ---------------------------------------------------------------- blocks that expire

bool Sharing::sooner(u32 a, u32 b) const {
    const Row &x = row(a), &y = row(b);
    return x.expires != y.expires ? x.expires < y.expires : x.order < y.order;
}

void Sharing::heap_put(u32 place, u32 id) {
    heap_[place] = id;
    row(id).place = place;
}

void Sharing::sift_up(u32 place) {
    const u32 id = heap_[place];
    for (; place != 0 && sooner(id, heap_[(place - 1) / 2]); place = (place - 1) / 2) heap_put(place, heap_[(place - 1) / 2]);
    heap_put(place, id);
}

void Sharing::sift_down(u32 place) {
    const u32 id = heap_[place], size = u32(heap_.size());
    for (u32 child = 2 * place + 1; child < size; child = 2 * place + 1) {
        if (child + 1 < size && sooner(heap_[child + 1], heap_[child])) ++child;
        if (!sooner(heap_[child], id)) break;
        heap_put(place, heap_[child]);
        place = child;
    }
    heap_put(place, id);
}

// ---------------------------------------------------------------- the choice

u32 Sharing::expired(double now) const {
    return !heap_.empty() && row(heap_.front()).expires <= now ? heap_.front() : kNil;
}

u32 Sharing::owner_head(u32 at) const {
    for (u32 level = 0; level < kLevels; ++level)
        if (owners_[at].head[level] != kNil) return owners_[at].head[level];
    return kNil;
}

u32 Sharing::above_quota(u64 salt, u64 incoming) {
    const u32 own = find_owner(salt);
    if (own != kNil && owners_[own].evictable != 0 && owners_[own].quota != kUnlimited &&
        owners_[own].resident + incoming > owners_[own].quota)
        return own;
    return above_first_;
}

std::size_t Sharing::bytes() const {
    return sizeof(*this) + rows_.bytes() + owners_.capacity() * sizeof(Owner) + heap_.capacity() * sizeof(u32);
}

}  // namespace kvactors
