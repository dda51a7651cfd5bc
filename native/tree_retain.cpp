// The eviction policy RETAIN in the tree: the time, the ends of requests, and the choice of a victim.
#include "tree.hpp"

namespace kvactors {

void Tree::advance(double now) {
    if (policy_ != nullptr) policy_->advance(now);
}

// A request has ended whose blocks the path still references. The blocks up to the last committed
// one are resident.
void Tree::touch(const Path& path, long long output) {
    require(path);
    if (policy_ == nullptr) return;
    const Acquired& when = path.acquired;
    policy_->touch(path.nodes.data(), path.committed, Visit{when.time, Mark{when.order, when.inside}, when.hits, output});
}

// A match that continues an earlier one of the same path adds to its hits.
void Tree::note_match(Path& path, u32 held, u32 hits) const {
    if (held == 0) {
        const Mark mark = policy_->mark();
        path.acquired = {policy_->now(), mark.order, mark.inside, 0};
    }
    path.acquired.hits += hits;
}

// The policy's choice. It has none while it is not trusted, and the least recently used block is as
// well a leaf.
u32 Tree::victim(bool& chosen) {
    const u32 id = policy_->victim();
    chosen = id != kNil;
    return chosen ? id : head_;
}

}  // namespace kvactors
