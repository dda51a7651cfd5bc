// The contents of nodes, and listings of the whole tree.
#include <stdexcept>

#include "tree.hpp"

namespace kvactors {
// Nodes that a retired tree still lists are not evictable: their blocks are being returned.
Statistics Tree::statistics() const {
    Statistics result = counts_;
    if (retired_) result.evictable = 0;
    return result;
}

std::vector<Key> Tree::device_hashes() {
    std::vector<Key> keys;
    keys.reserve(counts_.device);
    for (u32 id = 0; id < next_id_; ++id)
        if (is_node(id) && !gone(id) && (at(id).bits & kDevice) != 0) keys.push_back(name(id));
    return keys;
}

std::vector<Leaf> Tree::leaves() {
    std::vector<Leaf> result;
    for (u32 id = 0; id < next_id_; ++id) {
        if (!is_node(id) || gone(id) || at(id).children != 0) continue;
        std::vector<u32> chain;
        u32 up = id;
        for (; (at(up).bits & kRoot) == 0; up = at(up).parent) chain.push_back(up);
        Leaf leaf;
        leaf.root = given_name(up);
        for (std::size_t i = chain.size(); i-- > 0;) {
            const u32* tokens = tokens_of(chain[i]);
            leaf.tokens.insert(leaf.tokens.end(), tokens, tokens + block_size_);
            leaf.keys.push_back(name(chain[i]));
            leaf.states.push_back(char(state(at(chain[i]))));
        }
        result.push_back(std::move(leaf));
    }
    return result;
}

// Blocks of one eviction share most of their ancestors, which may be very many. They come deepest
// first, so the last one is looked at first, and each climbs until it meets a node whose root is
// noted: those of the eviction, and about every 64th of the others.
Contents Tree::contents(const u32* nodes, std::size_t count) const {
    for (std::size_t j = 0; j < count; ++j)
        if (!is_node(nodes[j])) throw std::invalid_argument("contents of a node that is not there");
    Contents result;
    result.roots.reserve(count);
    result.tokens.reserve(count * block_size_);
    std::unordered_map<u32, u32> root_of;
    std::vector<u32> passed, roots(count);
    constexpr u32 kNoted = 1u << 26;
    for (std::size_t j = count; j-- > 0;) {
        const u32 parent = at(nodes[j]).parent;
        auto known = root_of.find(parent);
        u32 up = parent;
        passed.assign(1, nodes[j]);
        while (known == root_of.end() && (at(up).bits & kRoot) == 0) {
            if (up * 0x9e3779b1u < kNoted) {
                known = root_of.find(up);
                passed.push_back(up);
            }
            up = at(up).parent;
        }
        roots[j] = known == root_of.end() ? up : known->second;
        for (const u32 id : passed) root_of.emplace(id, roots[j]);
    }
    for (std::size_t j = 0; j < count; ++j) {
        result.roots.push_back(given_name(roots[j]));
        const u32* tokens = tokens_of(nodes[j]);
        result.tokens.insert(result.tokens.end(), tokens, tokens + block_size_);
        const u32 extra = at(nodes[j]).extra;
        if (extra != 0) result.extras.emplace_back(u32(j), extras_[extra].bytes);
    }
    return result;
}

std::size_t Tree::bytes() const {
    return sizeof(*this) + nodes_.bytes() + tokens_.bytes() + keys_.bytes() + children_.bytes() + names_.bytes() +
           (retention_ == nullptr ? 0 : retention_->bytes()) +
           (host_retention_ == nullptr ? 0 : host_retention_->bytes()) + (shared_ == nullptr ? 0 : shared_->bytes());
}

Listing Tree::listing(u32 start, std::size_t count) {
    Listing result;
    u32 id = start;
    for (; id < next_id_ && result.keys.size() < count; ++id) {
        if (!is_node(id) || gone(id)) continue;
        result.keys.push_back(name(id));
        result.states.push_back(char(state(at(id))));
    }
    result.next = id < next_id_ ? id : kNil;
    return result;
}

}  // namespace kvactors
