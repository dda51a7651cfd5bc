// Nodes: search, creation and removal, and the list of evictable ones.
#include "tree.hpp"

#include <algorithm>
#include <atomic>
#include <random>
#include <stdexcept>

namespace kvactors {
namespace {

u64 mix(u64 x) {
    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdULL;
    x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;
    return x ^ (x >> 33);
}

// NH: the sum of products of (token + secret) pairs. Two different blocks collide with probability
// 2**-32 for any choice of tokens by a sender, and the loop vectorises.
KVACTORS_WIDE u64 nh(const u32* tokens, const u32* secret, u32 count) {
    u64 sum = 0;
    const u32 even = count & ~u32(1);
    for (u32 i = 0; i < even; i += 2) sum += u64(u32(tokens[i] + secret[i])) * u32(tokens[i + 1] + secret[i + 1]);
    if (even != count) sum += u64(u32(tokens[even] + secret[even])) * secret[even + 1];
    return sum;
}

unsigned chunk_shift(std::size_t capacity) {
    unsigned shift = 8;
    while (shift < 16 && (std::size_t(1) << shift) < capacity) ++shift;
    return shift;
}

std::atomic<u64> next_serial{1};

}  // namespace

Tree::Tree(u32 block_size, std::size_t capacity, bool touch, std::shared_ptr<LifeTables> retain, bool names_at_once,
           std::shared_ptr<LifeTables> retain_host)
    : block_size_(block_size),
      serial_(next_serial.fetch_add(1)),
      token_seed_((block_size + 1) & ~u32(1)),
      names_at_once_(names_at_once),
      nodes_(1, chunk_shift(capacity)),
      tokens_(block_size, chunk_shift(capacity)),
      keys_(1, chunk_shift(capacity)),
      hasher_(block_size),
      children_(capacity / 16, false),
      names_(capacity, touch && names_at_once),
      extras_(1) {
    std::fill_n(heads_, kLevels, kNil);
    std::fill_n(tails_, kLevels, kNil);
    std::random_device entropy;
    for (u64& word : seed_) word = u64(entropy()) << 32 | entropy();
    for (u32& word : token_seed_) word = u32(entropy());
    nodes_.reserve(capacity, touch);
    tokens_.reserve(capacity, touch);
    keys_.reserve(capacity, touch && names_at_once);
    if (retain_host != nullptr) host_retention_ = std::make_unique<Retention>(std::move(retain_host), capacity, kTotalGuard, touch, retain == nullptr);
    if (retain != nullptr) retention_ = std::make_unique<Retention>(std::move(retain), capacity, kDeviceGuard, touch);
    policy_ = retention_.get();
    memory_ = host_retention_.get();
}

u32 Tree::child_hash(u32 parent, u32 extra, const u32* tokens) const {
    const u64 sum = nh(tokens, token_seed_.data(), block_size_);
    return u32(mix(sum + parent * (seed_[0] | 1) + extra * (seed_[1] | 1)) >> 32);
}

// Identifies a block beyond the lifetime of its node. Collisions only blur statistics.
u64 Tree::key_of(u32 id) const {
    const Node& node = at(id);
    if ((node.bits & kRoot) != 0) {
        u64 first;
        std::memcpy(&first, given_name(id).bytes, 8);
        return first;
    }
    const u64 extra = node.extra == 0 ? 0 : std::hash<std::string>()(extras_[node.extra].bytes);
    return mix(nh(tokens_of(id), token_seed_.data(), block_size_) + mix((policy_ != nullptr ? policy_ : memory_)->key(node.parent) + seed_[3]) + extra);
}

u32 Tree::name_hash(const Key& name) const {
    u64 first;
    std::memcpy(&first, name.bytes, 8);
    return u32(mix(first ^ seed_[2]) >> 32);
}

u32 Tree::find_root(const Key& root) const {
    const auto found = roots_.find(text_of(root));
    return found == roots_.end() ? kNil : found->second;
}

u32 Tree::find_name(const Key& name) const {
    return names_.find(name_hash(name), [&](u32 id) { return given_name(id) == name && !gone(id); });
}

// The node of a hash that comes from outside: if it is not found, it may be that of a node without
// a name.
u32 Tree::find_named(const Key& key) {
    const u32 id = find_name(key);
    if (id != kNil || names_.used() + forgotten_ == counts_.nodes) return id;
    for (u32 each = 0; each < next_id_; ++each)
        if (is_node(each) && !gone(each)) name(each);
    return find_name(key);
}

void Tree::give_name(u32 id, const Key& name) {
    *keys_.row(id) = name;
    at(id).named = 1;
}

// Makes the names of the ancestors first. A node above which all have names costs one hash.
const Key& Tree::name(u32 id) {
    unnamed_.clear();
    for (u32 up = id; at(up).named == 0; up = at(up).parent) unnamed_.push_back(up);
    for (std::size_t i = unnamed_.size(); i-- > 0;) {
        const u32 node = unnamed_[i];
        const std::string& extra = extras_[at(node).extra].bytes;
        Key name;
        hasher_.name(given_name(at(node).parent), tokens_of(node), reinterpret_cast<const u8*>(extra.data()), u32(extra.size()), name);
        if (sharing_ != nullptr && sharing_->is_swept(node)) {
            *keys_.row(node) = name;  // it is found no more
            continue;
        }
        give_name(node, name);
        names_.insert(name_hash(name), node);
    }
    return given_name(id);
}

// A chain is made in ascending ids, so a child is most often the node after its parent. Only the
// other children are in the table, and only for those a hash is needed.
u32 Tree::find_child(u32 parent, u32 extra, const u32* tokens) const {
    const auto same = [&](u32 id) {
        __builtin_prefetch(tokens_of(id));  // beside the miss for the node
        const Node& node = at(id);
        return node.parent == parent && node.extra == extra &&
               std::memcmp(tokens_of(id), tokens, 4 * std::size_t(block_size_)) == 0;
    };
    if (parent + 1 < next_id_ && same(parent + 1)) return parent + 1;
    return children_.find(child_hash(parent, extra, tokens), same);
}

// The interned id of a block's extra key: 0 for none, kNil for one that no node has.
u32 Tree::known_extra(const Path& path, u32 block) const {
    const std::string* extra = path.extra(block);
    if (extra == nullptr) return 0;
    const auto found = extra_ids_.find(*extra);
    return found == extra_ids_.end() ? kNil : found->second;
}

u32 Tree::intern(const std::string* extra) {
    if (extra == nullptr) return 0;
    const auto found = extra_ids_.find(*extra);
    if (found != extra_ids_.end()) {
        ++extras_[found->second].uses;
        return found->second;
    }
    u32 id = u32(extras_.size());
    if (free_extras_.empty()) {
        extras_.push_back({*extra, 1});
    } else {
        id = free_extras_.back();
        free_extras_.pop_back();
        extras_[id] = {*extra, 1};
    }
    extra_ids_.emplace(*extra, id);
    return id;
}

// Freed ids are reused last in, first out. Chains are freed deepest first, so a chain takes
// ascending ids again.
u32 Tree::take_id() {
    u32 id = free_;
    if (id != kNil) {
        free_ = at(id).next;
        return id;
    }
    id = next_id_;
    if (id >= kFree) throw std::runtime_error("the block tree is full");
    if (id >= nodes_.rows()) {
        const std::size_t rows = std::size_t(id) + nodes_.rows_beside(id);
        nodes_.reserve(rows);
        tokens_.reserve(rows);
        keys_.reserve(rows, names_at_once_);
    }
    ++next_id_;
    return id;
}

u32 Tree::make_root(const Key& root) {
    const u32 found = find_root(root);
    if (found != kNil) return found;
    const u32 id = take_id();
    Node& node = at(id);
    node = Node{};
    give_name(id, root);
    node.parent = node.block = kNil;
    node.bits = kRoot;
    roots_.emplace(text_of(root), id);
    if (policy_ != nullptr) policy_->add(id, kNil, key_of(id));
    if (memory_ != nullptr) memory_->add(id, kNil, key_of(id));
    return id;
}

// Creates nodes for blocks [from, upto) of the path under the last node it holds, and references
// them. Table slots are prefetched: in a large tree each would otherwise be a wait for memory.
void Tree::create(Path& path, u32 from, u32 upto) {
    if (names_at_once_) path.name_to(upto);
    const u32 named = u32(std::min<std::size_t>(path.names.size(), upto));
    const bool below_root = from == 0 || path.flat;
    u32 parent = below_root ? make_root(path.root) : path.nodes[from - 1];
    if (path.salt != 0 && sharing_ == nullptr) share();
    const u32 owner = sharing_ == nullptr ? 0 : sharing_->owner_of(path.salt);
    if (sharing_ != nullptr && below_root) sharing_->add_root(parent, owner);
    path.nodes.resize(upto);
    hashes_.clear();
    const bool by_lru = policy_ == nullptr && memory_ == nullptr;
    std::size_t apart = 0;  // nodes for the table of children
    for (u32 i = from; i < upto; ++i) {
        const u32 id = take_id();
        Node& node = at(id);
        node.parent = parent;
        node.block = kNil;
        node.extra = path.extras.empty() ? 0 : intern(path.extra(i));
        node.refs = node.hits = 1;
        node.children = i + 1 < upto ? 1 : 0;
        node.named = 0;
        node.pending = node.bits = 0;
        node.prev = node.next = kNil;
        std::memcpy(tokens_of(id), path.block_tokens(i), 4 * std::size_t(block_size_));
        if (!by_lru) {
            const u64 key = key_of(id);
            if (policy_ != nullptr) policy_->add(id, parent, key);
            if (memory_ != nullptr) memory_->add(id, parent, key);
        }
        if (sharing_ != nullptr) sharing_->add(id, owner);
        if (id != parent + 1) {
            hashes_.push_back(child_hash(parent, node.extra, path.block_tokens(i)));
            hashes_.push_back(id);
            children_.prefetch(hashes_[2 * apart++]);
        }
        path.nodes[i] = parent = id;
    }
    ++at(at(path.nodes[from]).parent).children;
    for (std::size_t i = 0; i < apart; ++i) children_.insert(hashes_[2 * i], hashes_[2 * i + 1]);
    for (u32 i = from; i < upto && policy_ != nullptr; ++i) policy_->recall(path.nodes[i]);
    for (u32 i = from; i < upto && memory_ != nullptr; ++i) memory_->recall(path.nodes[i]);
    hashes_.clear();
    for (u32 i = from; i < named; ++i) {
        give_name(path.nodes[i], path.names[i]);
        hashes_.push_back(name_hash(path.names[i]));
        names_.prefetch(hashes_.back());
    }
    for (u32 i = from; i < named; ++i) names_.insert(hashes_[i - from], path.nodes[i]);
    counts_.nodes += upto - from;
    counts_.referenced += upto - from;
}

// Removes a node that nothing keeps any more, and then its parent if only that node kept it. In a
// retired tree nodes stay until `dismantle`: no look-up reaches them, and the removal of a long
// chain would be a long call.
void Tree::reap(u32 id) {
    while (!retired_ && !is_kept(id)) {
        const u32 parent = at(id).parent;
        drop(id);
        if (parent == kNil) return;
        --at(parent).children;
        id = parent;
    }
}

// A node that was cleared with its salt stays until `forget_step` meets it, which reports its name.
bool Tree::is_kept(u32 id) const {
    const Node& node = at(id);
    if (node.refs != 0 || node.children != 0 || (node.bits & kStateBits) != 0) return true;
    return sharing_ != nullptr && (node.bits & kRoot) == 0 && sharing_->awaits_sweep(id);
}

void Tree::drop(u32 id) {
    Node& node = at(id);
    if ((node.bits & kRoot) != 0) {
        if (sharing_ != nullptr) sharing_->remove_root(id);
        if (node.extra == 0) roots_.erase(text_of(given_name(id)));  // else another root may have the name
    } else {
        if (policy_ != nullptr) policy_->remove(id);
        if (memory_ != nullptr) memory_->remove(id);
        if (id != node.parent + 1) children_.erase(child_hash(node.parent, node.extra, tokens_of(id)), id);
        if (node.named != 0) names_.erase(name_hash(given_name(id)), id);
        if (node.extra != 0 && --extras_[node.extra].uses == 0) {
            extra_ids_.erase(extras_[node.extra].bytes);
            extras_[node.extra].bytes = std::string();
            free_extras_.push_back(node.extra);
        }
        --counts_.nodes;
        if (sharing_ != nullptr) forgotten_ -= sharing_->forgotten(id), sharing_->remove(id);
    }
    node.parent = kFree;
    node.next = free_;
    free_ = id;
}

void Tree::take_device(u32 id, u32 block) {
    Node& node = at(id);
    node.block = block;
    node.bits = u8((node.bits | kDevice) & ~kAnnounced);
    ++counts_.device;
    settle_memory(id);
    if (sharing_ != nullptr) sharing_->gained(id);
}

u32 Tree::lose_device(u32 id) {
    Node& node = at(id);
    const u32 block = node.block;
    if ((node.bits & kListed) != 0) unlink(id);
    if ((node.bits & kOffloading) != 0) --counts_.offloading;
    else if (sharing_ != nullptr) sharing_->lost(id);
    --counts_.device;
    node.block = kNil;
    node.bits &= u8(~(kDevice | kOffloading));
    settle_memory(id);
    return block;
}

// The last reference of a node that does not stay on the device for others is dropped.
void Tree::let_go_last(u32 id, std::vector<u32>& freed) {
    const Node& node = at(id);
    if ((retired_ || gone(id)) && node.pending == 0 && (node.bits & kDevice) != 0) {
        if (policy_ != nullptr) policy_->evicted(id, false);
        freed.push_back(lose_device(id));
    }
    reap(id);
}

}  // namespace kvactors
