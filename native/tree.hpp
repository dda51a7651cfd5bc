// The block tree: blocks tracked on this node, found by tokens, identified by hash, with one list
// of evictable device blocks.
//
// Not thread-safe. A tree and the paths that hold its nodes belong to one owner.
#pragma once

#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "path.hpp"
#include "retain.hpp"
#include "sha256.hpp"
#include "sharing.hpp"
#include "slab.hpp"
#include "table.hpp"

namespace kvactors {

enum Bits : u8 {
    kDevice = 1,      // owns a device block whose bytes are valid
    kHost = 2,        // by its last report the host tier holds it
    kLoading = 4,     // a copy into `block` is in flight
    kOffloading = 8,  // picked for eviction, and `block` is being copied away
    kStateBits = 15,
    kAnnounced = 16,
    kHostAge = 32,  // which of the last two `clear_host` the bit kHost follows: see Tree::hosted
    kListed = 64,  // in the list of evictable nodes
    kRoot = 128,   // start of a namespace: no tokens, no state, its name is the root key
};

// Two fill a cache line. Free nodes have parent kFree and are chained through `next`. Names are in
// an array of their own, which is not touched for a node that has none yet.
struct alignas(32) Node {
    u32 parent;
    u32 block;  // device block (also the target of a load), kNil if none
    u32 extra;  // interned extra key, 0 if none
    u32 refs;
    u32 children : 31;
    u32 named : 1;  // its block hash is known
    u16 hits;
    // Offload operations still reading `block`. More than one after match, release, evict again.
    u8 pending;
    u8 bits;
    u32 prev, next;
};
static_assert(sizeof(Node) == 32, "two nodes fill a cache line");

inline std::string text_of(const Key& key) { return std::string(reinterpret_cast<const char*>(key.bytes), 32); }

struct Match {
    u32 device_run;
    std::string states;  // of the matched nodes beyond the run
};

struct Committed {
    u32 start, stop;
    std::vector<u32> adopted;
};

struct Evicted {
    std::vector<u32> nodes, blocks;
    std::vector<Key> keys, parents;
    std::string states;
    std::vector<u32> freed;  // blocks that were cleared with their salt, beside those
    // Of a tree that tracks them: salt, priority and expiry of each block.
    std::vector<u64> salts;
    std::vector<int> priorities;
    std::vector<double> expiries;
};

// What an eviction is for.
struct Demand {
    u64 salt = 0;      // of the request
    u64 incoming = 0;  // blocks that it takes, 0 if it is for no request
    double now = 0;
};

struct Forgotten {
    std::vector<u32> freed;
    std::vector<Key> keys;  // of blocks that are not on the device any more
};

struct Offloaded {
    std::vector<u32> freed, kept;
};

struct Dropped {
    std::size_t evicted;  // of the freed blocks, the leading ones: the others are cleared with their salt
    std::vector<u32> freed;
    std::vector<Key> hosted, lost;  // names of the evicted blocks, by whether the host tier has them
};

struct Leaf {
    Key root;
    std::vector<u32> tokens;
    std::vector<Key> keys;
    std::string states;
};

// The inputs of block hashes: each node's root and tokens, and of few nodes (index, extra key).
struct Contents {
    std::vector<Key> roots;
    std::vector<u32> tokens;
    std::vector<std::pair<u32, std::string>> extras;
};

// Nodes in the order of their ids. next: the id to continue from, kNil at the end.
struct Listing {
    std::vector<Key> keys;
    std::string states;
    u32 next;
};

struct Statistics {
    u64 nodes = 0, device = 0, host = 0, evictable = 0, referenced = 0, loading = 0, offloading = 0, pinned = 0;
};

// What one step of a path takes: new device blocks, and blocks to be committed at most.
struct StepWork {
    u32 blocks, entered;
};

class Tree {
public:
    // retain: the statistics of the eviction policy RETAIN. Without them the policy is LRU.
    // retain_host: the same for the host tier. The tables of both tiers are the same ones.
    // names_at_once: a node gets its name when it is made, and not when the name is first needed.
    Tree(u32 block_size, std::size_t capacity, bool touch = true, std::shared_ptr<LifeTables> retain = nullptr,
         bool names_at_once = false, std::shared_ptr<LifeTables> retain_host = nullptr);
    Tree(const Tree&) = delete;
    Tree& operator=(const Tree&) = delete;

    u32 block_size() const { return block_size_; }
    bool retired() const { return retired_; }

    // tree_match.cpp
    Match peek(const Path& path, u32 limit);
    u32 referenced_run(const Path& path, u32 limit);
    Match pin(Path& path, u32 limit, bool used = true);
    std::optional<u32> pin_resident(Path& path, const Key& root, u32 limit, u32 least, u32 blocks, long long free, bool evict, double now);
    void keep(const Path& path, bool used);
    std::vector<u32> trim(Path& path, u32 held);
    std::vector<u32> retreat(Path& path, u32 blocks);
    std::vector<u32> truncate(Path& path, std::size_t tokens, std::string extra);
    std::vector<u32> drop_leading(Path& path, u32 blocks);
    std::string probe(const Path& path, u32 start, u32 stop) const;
    std::vector<u32> release(Path& path);
    std::vector<u32> fork(const Path& from, Path& to);
    u32 mark_announced(Path& path, u32 start, u32 stop);
    std::vector<u32> worth_saving(const Path& path, u32 start, u32 stop, u32 min_hits) const;

    // tree_commit.cpp
    Committed commit(Path& path, u32 upto);
    std::optional<u32> commit_tokens(Path& path, long long tokens, bool known);
    std::optional<StepWork> plan_step(const Path& path, std::size_t added, long long computed) const;
    u32 settle(Path& path);
    void replace(Path& path, u32 position, u32 block);

    // tree_load.cpp
    std::vector<u32> begin_load(Path& path, u32 start, u32 stop);
    std::vector<u32> finish_load(const u32* nodes, std::size_t count, std::size_t good);

    // tree_evict.cpp
    Evicted evict(std::size_t count, bool with_names = true, const Demand& demand = {});
    Dropped drop(std::size_t count, bool with_names, const Demand& demand);
    Offloaded finish_offload(const u32* nodes, std::size_t count, const u8* on_host);
    std::size_t host_blocks_added(const Key* keys, std::size_t count);
    std::size_t host_blocks_removed(const Key* keys, std::size_t count);
    void clear_host();
    bool sweep_host(std::size_t count);
    std::size_t retire();
    std::vector<u32> sweep(std::size_t count);
    std::size_t returning() const { return retired_ ? counts_.evictable - read_ : 0; }
    bool idle() const { return retired_ && counts_.device == 0 && counts_.loading == 0 && counts_.referenced == 0; }
    bool dismantle();

    // tree_retain.cpp: no effect under LRU
    void advance(double now);
    void touch(const Path& path, long long output, u32 hint = 0);
    std::optional<std::vector<u32>> end(Path& path, long long output, double now);
    std::vector<Key> host_victims(std::size_t count);
    u64 host_kept(bool exclusive) const;
    u32 host_lacks(const Path& path, u32 start, u32 stop) const;
    const Retention* retention() const { return retention_.get(); }
    const Retention* host_retention() const { return host_retention_.get(); }

    // tree_share.cpp: salts, quotas and hints
    void share();
    Sharing* sharing() { return sharing_; }
    const Sharing* sharing() const { return sharing_; }
    void hint(const Path& path, u32 level, double expiry);
    bool pin_blocks(const Path& path, u32 blocks, u64 limit, std::vector<u32>& nodes);
    std::vector<u32> unpin_blocks(const u32* nodes, std::size_t count);
    bool begin_forget(u64 salt);
    bool forget_step(std::size_t count, bool with_names, Forgotten& out);
    bool forgetting() const { return to_forget_ != 0 || bare_ != kNil; }
    bool is_forgotten(const Path& path) const;
    bool is_gone(u32 id) const { return is_node(id) && gone(id); }

    // tree_inspect.cpp
    std::vector<Key> device_hashes();
    std::vector<Leaf> leaves();
    Contents contents(const u32* nodes, std::size_t count) const;
    Statistics statistics() const;
    std::size_t bytes() const;
    std::size_t named() const { return names_.used(); }
    Listing listing(u32 start, std::size_t count);
    void check() const;  // tree_check.cpp

private:
    friend class TreeCheck;
    friend class TreeWalk;
    friend class Unlisting;
    static constexpr u32 kFree = 0xfffffffeu;
    static constexpr u32 kChainTokens = 1024;  // tokens that are compared together

    struct Extra {
        std::string bytes;
        u32 uses;
    };

    std::vector<u32> drop_beyond(Path& path, u32 held);
    void hold(Path& path, u32 limit, const Match& match, bool used);
    Node& at(u32 id) { return *nodes_.row(id); }
    const Node& at(u32 id) const { return *nodes_.row(id); }
    const Key& given_name(u32 id) const { return *keys_.row(id); }  // of a node that has one
    u32* tokens_of(u32 id) { return tokens_.row(id); }
    const u32* tokens_of(u32 id) const { return tokens_.row(id); }
    bool is_used(u32 id) const { return id < next_id_ && at(id).parent != kFree; }
    bool is_node(u32 id) const { return is_used(id) && (at(id).bits & kRoot) == 0; }
    // A node whose bit precedes the last `clear_host` is not hosted. `sweep_host` removes the bits
    // later.
    bool hosted(const Node& node) const { return (node.bits & kHost) != 0 && (node.bits & kHostAge) == host_age_; }
    u8 state(const Node& node) const { return u8(node.bits & (hosted(node) ? kStateBits : kStateBits & ~kHost)); }
    bool set_host(u32 id);
    // Resident and not being evicted. The set of firm nodes is closed upwards (see tree_evict.cpp).
    static bool is_firm(const Node& node) { return (node.bits & (kDevice | kOffloading)) == kDevice; }

    // Cleared with its salt, and kept only for those that use it.
    bool gone(u32 id) const { return sharing_ != nullptr && sharing_->forgotten(id); }
    // Whether a node has no place but that in the list: no RETAIN of the host tier, salts, quotas or
    // hints. RETAIN of the device follows the list.
    bool is_plain() const { return memory_ == nullptr && sharing_ == nullptr; }
    bool has_listed() const { return counts_.evictable != 0; }
    u32 first_listed() const;
    u32 shared_victim(const Demand& demand, bool& chosen);

    // tree.cpp: nodes, their tables and the list
    u32 child_hash(u32 parent, u32 extra, const u32* tokens) const;
    u32 name_hash(const Key& name) const;
    u32 find_root(const Key& root) const;
    u32 find_name(const Key& name) const;
    u32 find_named(const Key& name);
    const Key& name(u32 id);
    void give_name(u32 id, const Key& name);
    u32 find_child(u32 parent, u32 extra, const u32* tokens) const;
    u32 find_block(const Path& path, u32 i, u32 above) const;
    u32 node_above(const Path& path, u32 i) const;
    u32 chain_below(u32 parent, const u32* tokens, u32 limit, bool& resident) const;
    u32 known_extra(const Path& path, u32 block) const;
    u32 intern(const std::string* extra);
    u32 take_id();
    u32 make_root(const Key& root);
    void create(Path& path, u32 from, u32 upto);
    void reap(u32 id);
    void drop(u32 id);
    bool is_kept(u32 id) const;
    void forget_node(u32 id, bool with_names, Forgotten& out);
    void discard(u32 id, std::vector<u32>& freed);
    void push(u32 id);
    u32 list_shared(u32 id);
    void unlink(u32 id);
    void take_device(u32 id, u32 block);
    u32 lose_device(u32 id);
    void acquire(u32 id);
    void let_go(u32 id, std::vector<u32>& freed);
    void let_go_run(const u32* first, const u32* end, bool flat, std::vector<u32>& freed);
    void let_go_last(u32 id, std::vector<u32>& freed);
    void stay(u32 id, Node& node);

    void require(const Path& path) const;
    void require_held(const Path& path, u32 upto) const;
    u32 walk(const Path& path, u32 limit, std::vector<u32>& found) const;
    Match describe(const std::vector<u32>& found, u32 resident) const;
    void take_names(Path& path) const;
    void note_match(Path& path, u32 limit, const Match& match) const;
    void settle_memory(u32 id);
    u64 key_of(u32 id) const;
    u32 preferred();
    u32 victim(bool& chosen);
    const char* commit_refusal(const Path& path, u32 upto) const;
    void adopt(Path& path, u32 position, u32 id, Committed& result);
    void freshen_ancestors(u32 id);

    u32 block_size_;
    bool retired_ = false;
    u64 serial_;
    u64 seed_[4];
    Raw<u32> token_seed_;  // one random word a token, which makes the hash of a block universal
    const bool names_at_once_;
    Slab<Node, 1> nodes_;
    Slab<u32> tokens_;
    Slab<Key, 1> keys_;  // names by node
    ChainHasher hasher_;
    u32 next_id_ = 0;
    u32 free_ = kNil;
    // Least and most recently used, by priority. Without hints all blocks have the same one.
    u32 heads_[kLevels], tails_[kLevels];
    // Children whose id is not that of their parent plus 1, and nodes that have a name.
    Table children_, names_;
    std::unordered_map<std::string, u32> roots_;
    std::unordered_map<std::string, u32> extra_ids_;
    std::vector<Extra> extras_;
    std::vector<u32> free_extras_;
    Statistics counts_;
    u8 host_age_ = 0;
    u32 stale_ = 0;  // nodes below this id may have a bit kHost from before the last `clear_host`
    u32 reaping_ = kNil;    // where `sweep_host` continues a chain of nodes that nothing keeps
    u64 read_ = 0;  // listed nodes whose block an offload still reads
    std::vector<u32> scratch_, hashes_, unnamed_;
    std::unique_ptr<Retention> retention_;
    Retention* policy_ = nullptr;  // nullptr under LRU, and once the tree is retired
    // The host tier's policy. Its blocks are those of device and host, of which it evicts those
    // that only the host has.
    std::unique_ptr<Retention> host_retention_;
    Retention* memory_ = nullptr;
    std::unique_ptr<Sharing> shared_;
    Sharing* sharing_ = nullptr;  // nullptr without salts, quotas and hints
    u64 forgotten_ = 0;           // nodes that a `forget_step` has met
    u32 to_forget_ = 0;           // nodes below this id may be cleared with their salt and not met yet
    u32 bare_ = kNil;             // where `forget_step` continues a chain of nodes that nothing keeps
};

}  // namespace kvactors

#include "tree_list.hpp"
