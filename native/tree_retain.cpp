// The eviction policy RETAIN in the tree: the time, the ends of requests, and the choice of victims.
#include <algorithm>

#include "tree.hpp"

namespace kvactors {

void Tree::advance(double now) {
    if (policy_ != nullptr) policy_->advance(now);
    if (memory_ != nullptr) memory_->advance(now);
}

// A request has ended whose blocks the path still references. The blocks up to the last committed
// one are resident.
void Tree::touch(const Path& path, long long output, u32 hint) {
    require(path);
    const Acquired& when = path.acquired;
    const auto visit = [&](const Seen& seen) {
        return Visit{when.time, Mark{seen.order, seen.inside}, seen.hits, when.limit, output, hint};
    };
    if (policy_ != nullptr) policy_->touch(path.nodes.data(), path.committed, visit(when.device));
    if (memory_ != nullptr) memory_->touch(path.nodes.data(), path.committed, visit(when.memory));
}

// The end of a request in one call, in a tree without salts and hints.
std::optional<std::vector<u32>> Tree::end(Path& path, long long output, double now) {
    require(path);
    if (sharing_ != nullptr || retired_) return std::nullopt;
    advance(now);
    touch(path, output);
    return release(path);
}

void Tree::note_match(Path& path, u32 limit, const Match& match) const {
    const auto begin = [&](const Retention& policy) {
        const Mark mark = policy.mark();
        return Seen{mark.order, mark.inside, match.device_run};
    };
    Acquired& when = path.acquired = Acquired{};
    when.time = (policy_ != nullptr ? policy_ : memory_)->now();
    when.limit = limit;
    if (policy_ != nullptr) when.device = begin(*policy_);
    if (memory_ == nullptr) return;
    when.memory = begin(*memory_);
    for (const char state : match.states) {
        if ((u8(state) & (kDevice | kHost)) == 0) break;
        ++when.memory.hits;
    }
}

// The policy's choice. It has none while it is not trusted, and the least recently used block is as
// well a leaf. Nor while that block is due, by the guard of both tiers.
u32 Tree::preferred() {
    if (policy_ == nullptr) return kNil;
    return memory_ != nullptr && memory_->is_due(first_listed()) ? kNil : policy_->victim();
}

u32 Tree::victim(bool& chosen) {
    const u32 id = preferred();
    chosen = id != kNil;
    return chosen ? id : heads_[kPlainLevel];
}

// Blocks that the host tier should evict next, in this order. They are no longer ranked, until they
// are used.
std::vector<Key> Tree::host_victims(std::size_t count) {
    std::vector<Key> result;
    if (memory_ == nullptr) return result;
    memory_->next_choice();
    while (result.size() < count) {
        u32 id = memory_->victim();
        const bool chosen = id != kNil;
        if (!chosen) id = memory_->oldest();
        if (id == kNil) break;
        memory_->evicted(id, chosen && hosted(at(id)));
        memory_->mark_leaving(id);
        memory_->unlist(id);
        if (!hosted(at(id))) memory_->mark_gone(id);  // of before a `clear_host`
        else result.push_back(name(id));
    }
    return result;
}

// Blocks of the host tier that were not named as victims. In exclusive tiers those that a request
// uses are leaving for the device.
u64 Tree::host_kept(bool exclusive) const {
    if (memory_ == nullptr) return counts_.host;
    if (exclusive) return std::min(counts_.host, memory_->listed());  // a cleared tier's are listed still
    return counts_.host - std::min(counts_.host, memory_->leaving());
}

// Blocks of a path that the host tier does not have.
u32 Tree::host_lacks(const Path& path, u32 start, u32 stop) const {
    require(path);
    u32 lacking = 0;
    for (u32 i = start; i < stop; ++i) lacking += i >= path.held() || !hosted(at(path.nodes[i]));
    return lacking;
}

}  // namespace kvactors
