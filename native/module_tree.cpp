// The Python module: argument checks and conversions of the block tree.
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "module.hpp"
#include "pool.hpp"

namespace kvactors {
namespace {

using NodeIds = nb::ndarray<nb::numpy, u32, nb::ndim<1>>;
using NodesIn = nb::ndarray<const u32, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

NodeIds nodes_of(std::vector<u32> nodes) {
    auto* owned = new std::vector<u32>(std::move(nodes));
    nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<u32>*>(p); });
    return NodeIds(owned->data(), {owned->size()}, owner);
}

std::vector<Key> keys_of(const nb::bytes& keys) {
    if (keys.size() % 32 != 0) throw nb::value_error("keys must be a multiple of 32 bytes");
    std::vector<Key> result(keys.size() / 32);
    if (!result.empty()) std::memcpy(result.data(), keys.c_str(), keys.size());
    return result;
}

u64 quota_of(Id blocks) { return blocks < 0 ? kUnlimited : u64(blocks); }  // negative: none

nb::tuple match_tuple(const Match& match) {
    return nb::make_tuple(match.device_run, nb::bytes(match.states.data(), match.states.size()));
}

}  // namespace

void bind_tree(nb::module_& m) {
    nb::class_<BlockPool>(m, "BlockPool")
        .def("__init__", [](BlockPool* self, Id total) { new (self) BlockPool(size_of(total, "total out of range")); }, "total"_a)
        .def_prop_ro("total", [](const BlockPool& p) { return p.total(); })
        .def_prop_ro("free", [](const BlockPool& p) { return p.free(); })
        .def_prop_ro("num_shared", [](const BlockPool& p) { return p.shared(); })
        .def("owners", [](const BlockPool& p, Id block) { return p.owners(block_of(block)); }, "block"_a)
        .def("take", [](BlockPool& p, Id count) { return ids_of(p.take(size_of(count, "count out of range"))); }, "count"_a)
        .def("share", [](BlockPool& p, const std::vector<Id>& blocks) {
            for (const Id block : blocks) p.share(block_of(block));
        }, "blocks"_a)
        .def("give", [](BlockPool& p, const std::vector<Id>& blocks) {
            for (const Id block : blocks) p.give(block < 0 ? kNil : u32(block));
        }, "blocks"_a)
        .def("check", &BlockPool::check);
    nb::class_<LifeTables>(m, "LifeTables")
        .def("__init__", [](LifeTables* self, bool inverted, Id first) { new (self) LifeTables(inverted, size_of(first, "first out of range")); }, "inverted"_a = false, "first"_a = 0)
        .def_prop_ro("requests", [](const LifeTables& t) { return t.requests(); });
    nb::class_<PyTree> tree(m, "BlockTree");
    nb::class_<PyCheck>(m, "TreeCheck")
        .def(nb::init<const PyTree&>(), "tree"_a, nb::keep_alive<1, 2>())
        .def("step", [](PyCheck& c, Id count) {
            const Busy busy(c.tree.busy);
            return c.check.step(size_of(count, "count out of range"), c.version != c.tree.version);
        }, "count"_a)
        .def_prop_ro("exact", [](const PyCheck& c) { return c.check.exact(); });
    nb::class_<PyWalk>(m, "TreeWalk")
        .def(nb::init<PyTree&>(), "tree"_a, nb::keep_alive<1, 2>())
        .def("step", [](PyWalk& w, Id count) {
            const Busy busy(w.tree.busy);
            std::vector<Stretch> found;
            const bool over = w.walk.step(size_of(count, "count out of range"), found);
            nb::list result;
            for (const Stretch& one : found) {
                nb::list extras;
                for (const auto& [position, extra] : one.extras)
                    extras.append(nb::make_tuple(position, nb::bytes(extra.data(), extra.size())));
                result.append(nb::make_tuple(bytes_of(&one.root, 1), bytes_of(&one.parent, 1), one.start,
                                             bytes_of(one.tokens.data(), one.tokens.size()),
                                             bytes_of(one.keys.data(), one.keys.size()),
                                             nb::bytes(one.states.data(), one.states.size()), nb::tuple(extras)));
            }
            return nb::make_tuple(over, result);
        }, "count"_a);
    tree.def("__init__", [](PyTree* self, Id block_size, Id capacity, bool touch, std::shared_ptr<LifeTables> retain, bool names_at_once,
                         std::shared_ptr<LifeTables> retain_host) {
            if (block_size < 1 || block_size > (1 << 24)) throw nb::value_error("block_size must be between 1 and 2**24");
            new (self) PyTree(u32(block_size), size_of(capacity, "capacity out of range"), touch, std::move(retain), names_at_once,
                              std::move(retain_host));
        }, "block_size"_a, "capacity"_a = 0, "touch"_a = true, "retain"_a.none() = nb::none(), "eager_hashes"_a = false,
            "retain_host"_a.none() = nb::none())
        .def_prop_ro("block_size", [](const PyTree& t) { return t.block_size(); })
        .def_prop_ro("retired", [](const PyTree& t) { return t.retired(); })
        .def_prop_ro("hashed", [](const PyTree& t) { return t.named(); })
        .def("pin", [](PyTree& t, PyPath& p, Id max_blocks, bool used) {
            const Change change(t);
            const Busy busy(p.busy);
            return match_tuple(without_gil(p.tokens.size(), [&] { return t.pin(p, limit_of(max_blocks), used); }));
        }, "path"_a, "max_blocks"_a = -1, "used"_a = true)
        .def("pin_resident", [](PyTree& t, PyPath& p, const nb::bytes& root, Id max_blocks, Id least, Id blocks, Id free, bool evict, double now) -> Id {
            const Change change(t);
            const Busy busy(p.busy);
            const Key start = key_of(root, "root must be 32 bytes");
            const u32 limit = limit_of(max_blocks), some = size_of(least, "least out of range"), all = size_of(blocks, "blocks out of range");
            const std::optional<u32> run = without_gil(p.tokens.size(), [&] { return t.pin_resident(p, start, limit, some, all, free, evict, now); });
            return run ? Id(*run) : -1;
        }, "path"_a, "root"_a, "max_blocks"_a, "least"_a, "blocks"_a, "free"_a, "evict"_a, "now"_a)
        .def("keep", [](PyTree& t, PyPath& p, bool used) {
            const Change change(t);
            const Busy busy(p.busy);
            t.keep(p, used);
        }, "path"_a, "used"_a = true)
        .def("peek", [](PyTree& t, PyPath& p, Id max_blocks) {
            const Busy tree_busy(t.busy), path_busy(p.busy);
            return match_tuple(without_gil(p.tokens.size(), [&] { return t.peek(p, limit_of(max_blocks)); }));
        }, "path"_a, "max_blocks"_a = -1)
        .def("referenced_run", [](PyTree& t, PyPath& p, Id max_blocks) {
            const Busy tree_busy(t.busy), path_busy(p.busy);
            return without_gil(p.tokens.size(), [&] { return t.referenced_run(p, limit_of(max_blocks)); });
        }, "path"_a, "max_blocks"_a = -1)
        .def("trim", [](PyTree& t, PyPath& p, Id held) {
            const Change change(t);
            const Busy busy(p.busy);
            return ids_of(t.trim(p, size_of(held, "held out of range")));
        }, "path"_a, "held"_a)
        .def("retreat", [](PyTree& t, PyPath& p, Id n) {
            const Change change(t);
            const Busy busy(p.busy);
            return ids_of(t.retreat(p, size_of(n, "blocks out of range")));
        }, "path"_a, "blocks"_a)
        .def("truncate", [](PyTree& t, PyPath& p, Id tokens, const nb::bytes& extra) {
            const Change change(t);
            const Busy busy(p.busy);
            if (tokens < 0) throw nb::value_error("num_tokens out of range");
            return ids_of(t.truncate(p, std::size_t(tokens), std::string(extra.c_str(), extra.size())));
        }, "path"_a, "num_tokens"_a, "extra"_a = nb::bytes("", 0))
        .def("drop_leading", [](PyTree& t, PyPath& p, Id blocks) {
            const Change change(t);
            const Busy busy(p.busy);
            return ids_of(t.drop_leading(p, size_of(blocks, "blocks out of range")));
        }, "path"_a, "blocks"_a)
        .def("probe", [](const PyTree& t, const PyPath& p, Id start, Id stop) {
            const Busy tree_busy(t.busy), path_busy(p.busy);
            if (stop < start) throw nb::value_error("blocks out of range");
            const std::string states = t.probe(p, size_of(start, "start out of range"), size_of(stop, "stop out of range"));
            return nb::bytes(states.data(), states.size());
        }, "path"_a, "start"_a, "stop"_a)
        .def("commit", [](PyTree& t, PyPath& p, Id upto) {
            const Change change(t);
            const Busy busy(p.busy);
            const u32 limit = size_of(upto, "upto out of range");
            const std::size_t fresh = limit > p.committed ? limit - p.committed : 0;
            const Committed done = without_gil(fresh * p.block_size, [&] { return t.commit(p, limit); });
            return nb::make_tuple(done.start, done.stop, done.adopted);
        }, "path"_a, "upto"_a)
        .def("commit_tokens", [](PyTree& t, PyPath& p, Id tokens, bool known) -> Id {
            const Change change(t);
            const Busy busy(p.busy);
            const std::size_t fresh = known ? 0 : p.tokens.size() - std::min(p.tokens.size(), std::size_t(p.committed) * p.block_size);
            const std::optional<u32> committed = without_gil(fresh, [&] { return t.commit_tokens(p, tokens, known); });
            return committed ? Id(*committed) : -1;
        }, "path"_a, "tokens"_a, "known"_a)
        .def("release", [](PyTree& t, PyPath& p) {
            const Change change(t);
            const Busy busy(p.busy);
            return ids_of(t.release(p));
        }, "path"_a)
        .def("fork", [](PyTree& t, PyPath& from, PyPath& to) {
            const Change change(t);
            const Busy from_busy(from.busy), to_busy(to.busy);
            return ids_of(without_gil(from.tokens.size(), [&] { return t.fork(from, to); }));
        }, "path"_a, "fork"_a)
        .def("begin_load", [](PyTree& t, PyPath& p, Id start, Id stop) {
            const Change change(t);
            const Busy busy(p.busy);
            return nodes_of(t.begin_load(p, size_of(start, "start out of range"), size_of(stop, "stop out of range")));
        }, "path"_a, "start"_a, "stop"_a)
        .def("finish_load", [](PyTree& t, const NodesIn& nodes, Id good) {
            const Change change(t);
            return ids_of(t.finish_load(nodes.data(), nodes.shape(0), size_of(good, "good out of range")));
        }, "nodes"_a, "good"_a)
        .def("settle", [](PyTree& t, PyPath& p) {
            const Change change(t);
            const Busy busy(p.busy);
            return t.settle(p);
        }, "path"_a)
        .def("replace", [](PyTree& t, PyPath& p, Id position, Id block) {
            const Change change(t);
            const Busy busy(p.busy);
            t.replace(p, size_of(position, "position out of range"), block == -1 ? kNil : block_of(block));
        }, "path"_a, "position"_a, "block"_a)
        .def("advance", [](PyTree& t, double now) {
            const Change change(t);
            t.advance(now);
        }, "now"_a)
        .def("touch", [](PyTree& t, PyPath& p, Id output_tokens, bool ends, double returns_in) {
            const Change change(t);
            const Busy busy(p.busy);
            t.touch(p, output_tokens, LifeTables::hint_of(ends, returns_in));
        }, "path"_a, "output_tokens"_a = -1, "ends"_a = false, "returns_in"_a = -1.0)
        .def("end", [](PyTree& t, PyPath& p, Id output_tokens, double now) -> nb::object {
            const Change change(t);
            const Busy busy(p.busy);
            const std::optional<std::vector<u32>> freed = t.end(p, output_tokens, now);
            return freed ? nb::cast(ids_of(*freed)) : nb::none();
        }, "path"_a, "output_tokens"_a, "now"_a)
        .def("host_victims", [](PyTree& t, Id count) {
            const Change change(t);
            const std::vector<Key> keys = t.host_victims(size_of(count, "count out of range"));
            return bytes_of(keys.data(), keys.size());
        }, "count"_a)
        .def("host_kept", [](const PyTree& t, bool exclusive) {
            const Busy busy(t.busy);
            return t.host_kept(exclusive);
        }, "exclusive"_a)
        .def("host_lacks", [](const PyTree& t, const PyPath& p, Id start, Id stop) {
            const Busy tree_busy(t.busy), path_busy(p.busy);
            return t.host_lacks(p, size_of(start, "start out of range"), size_of(stop, "stop out of range"));
        }, "path"_a, "start"_a, "stop"_a)
        .def("retention", [](const PyTree& t, bool host) -> nb::object {
            const Busy busy(t.busy);
            const Retention* of = host ? t.host_retention() : t.retention();
            if (of == nullptr) return nb::none();
            const RetentionCounts c = of->counts();
            nb::dict d;
            d["runs"] = c.runs;
            d["ghosts"] = c.ghosts;
            d["requests"] = c.requests;
            d["touched"] = c.touched;
            d["hits"] = c.hits;
            d["shadow_hits"] = c.shadow_hits;
            d["resident"] = c.resident;
            d["displaced"] = c.displaced;
            d["limit"] = c.limit;
            d["chosen"] = c.chosen;
            d["oldest"] = c.oldest;
            return d;
        }, "host"_a = false)
        .def("share", [](PyTree& t) {
            const Change change(t);
            t.share();
        })
        .def_prop_ro("pinned", [](const PyTree& t) { return t.statistics().pinned; })
        .def_prop_ro("quota_evictions", [](const PyTree& t) { return t.sharing() == nullptr ? 0 : t.sharing()->quota_evictions(); })
        .def_prop_ro("sharing", [](const PyTree& t) { return t.sharing() != nullptr; })
        .def("set_default_quota", [](PyTree& t, Id blocks) {
            const Change change(t);
            t.share();
            if (t.sharing() != nullptr) t.sharing()->set_default(quota_of(blocks));
        }, "blocks"_a)
        .def("set_quota", [](PyTree& t, u64 salt, Id blocks, bool named) {
            const Change change(t);
            t.share();
            if (t.sharing() == nullptr) return;
            if (named) t.sharing()->set_quota(salt, quota_of(blocks));
            else t.sharing()->reset_quota(salt);
        }, "salt"_a, "blocks"_a, "named"_a = true)
        .def("owners", [](const PyTree& t) {
            const Busy busy(t.busy);
            nb::dict found;
            if (t.sharing() == nullptr) return found;
            for (const auto& [salt, at] : t.sharing()->by_salt()) {
                const Owner& owner = t.sharing()->owner(at);
                found[nb::int_(salt)] = nb::make_tuple(owner.resident, owner.evictable, owner.evicted);
            }
            return found;
        })
        .def("owner", [](const PyTree& t, u64 salt) {
            const Busy busy(t.busy);
            const u32 at = t.sharing() == nullptr ? kNil : t.sharing()->find_owner(salt);
            const Owner owner = at == kNil ? Owner{} : t.sharing()->owner(at);
            return nb::make_tuple(owner.resident, owner.evictable, owner.evicted);
        }, "salt"_a)
        .def("hint", [](PyTree& t, const PyPath& p, int priority, double expiry) {
            const Change change(t);
            const Busy busy(p.busy);
            if (priority < -2 || priority > 2) throw nb::value_error("priority out of range");
            t.hint(p, u32(priority + 2), expiry);
        }, "path"_a, "priority"_a, "expiry"_a = Sharing::kNever)
        .def("pin_blocks", [](PyTree& t, const PyPath& p, Id blocks, Id limit) -> nb::object {
            const Change change(t);
            const Busy busy(p.busy);
            std::vector<u32> nodes;
            if (!t.pin_blocks(p, size_of(blocks, "blocks out of range"), size_of(limit, "limit out of range"), nodes))
                return nb::none();
            return nb::cast(nodes_of(std::move(nodes)));
        }, "path"_a, "blocks"_a, "limit"_a)
        .def("unpin_blocks", [](PyTree& t, const NodesIn& nodes) {
            const Change change(t);
            return ids_of(t.unpin_blocks(nodes.data(), nodes.shape(0)));
        }, "nodes"_a)
        .def("begin_forget", [](PyTree& t, u64 salt) {
            const Change change(t);
            return t.begin_forget(salt);
        }, "salt"_a)
        .def("forget_step", [](PyTree& t, Id count, bool hashes) {
            const Change change(t);
            Forgotten out;
            const bool over = t.forget_step(size_of(count, "count out of range"), hashes, out);
            return nb::make_tuple(over, ids_of(out.freed), bytes_of(out.keys.data(), out.keys.size()));
        }, "count"_a, "hashes"_a = true)
        .def("is_forgotten", [](const PyTree& t, const PyPath& p) {
            const Busy busy(t.busy), path_busy(p.busy);
            return t.is_forgotten(p);
        }, "path"_a)
        .def("forgotten", [](const PyTree& t, const NodesIn& nodes) {
            const Busy busy(t.busy);
            std::vector<u32> found;
            for (std::size_t j = 0; j < nodes.shape(0); ++j)
                if (t.is_gone(nodes.data()[j])) found.push_back(u32(j));
            return found;
        }, "nodes"_a)
        .def("evict", [](PyTree& t, Id count, bool hashes, u64 salt, Id incoming, double now) {
            const Change change(t);
            const Demand demand{salt, size_of(incoming, "incoming out of range"), now};
            Evicted out = t.evict(size_of(count, "count out of range"), hashes, demand);
            const nb::tuple traits = nb::make_tuple(nb::tuple(nb::cast(out.salts)), nb::tuple(nb::cast(out.priorities)),
                                                    nb::tuple(nb::cast(out.expiries)));
            return nb::make_tuple(nodes_of(std::move(out.nodes)), bytes_of(out.keys.data(), out.keys.size()),
                                  bytes_of(out.parents.data(), out.parents.size()), ids_of(out.blocks),
                                  nb::bytes(out.states.data(), out.states.size()), traits, ids_of(out.freed));
        }, "count"_a, "hashes"_a = true, "salt"_a = 0, "incoming"_a = 0, "now"_a = 0.0)
        .def("drop", [](PyTree& t, Id count, bool hashes, u64 salt, Id incoming, double now) {
            const Change change(t);
            const Demand demand{salt, size_of(incoming, "incoming out of range"), now};
            const Dropped out = t.drop(size_of(count, "count out of range"), hashes, demand);
            return nb::make_tuple(ids_of(out.freed), out.evicted, bytes_of(out.hosted.data(), out.hosted.size()),
                                  bytes_of(out.lost.data(), out.lost.size()));
        }, "count"_a, "hashes"_a = true, "salt"_a = 0, "incoming"_a = 0, "now"_a = 0.0)
        .def("contents", [](const PyTree& t, const NodesIn& nodes) {
            const Busy busy(t.busy);
            const Contents out = t.contents(nodes.data(), nodes.shape(0));
            nb::list extras;
            for (const auto& [index, extra] : out.extras)
                extras.append(nb::make_tuple(index, nb::bytes(extra.data(), extra.size())));
            return nb::make_tuple(bytes_of(out.roots.data(), out.roots.size()), bytes_of(out.tokens.data(), out.tokens.size()),
                                  extras);
        }, "nodes"_a)
        .def("finish_offload", [](PyTree& t, const NodesIn& nodes, const nb::bytes& on_host) {
            const Change change(t);
            if (on_host.size() != nodes.shape(0)) throw nb::value_error("on_host must hold one byte for each node");
            const u8* flags = reinterpret_cast<const u8*>(on_host.c_str());
            const Offloaded out = t.finish_offload(nodes.data(), nodes.shape(0), flags);
            return nb::make_tuple(ids_of(out.freed), out.kept);
        }, "nodes"_a, "on_host"_a)
        .def("host_blocks_added", [](PyTree& t, const nb::bytes& hashes) {
            const Change change(t);
            const std::vector<Key> names = keys_of(hashes);
            return t.host_blocks_added(names.data(), names.size());
        }, "hashes"_a)
        .def("host_blocks_removed", [](PyTree& t, const nb::bytes& hashes) {
            const Change change(t);
            const std::vector<Key> names = keys_of(hashes);
            return t.host_blocks_removed(names.data(), names.size());
        }, "hashes"_a)
        .def("clear_host", [](PyTree& t) {
            const Change change(t);
            t.clear_host();
        })
        .def("sweep_host", [](PyTree& t, Id count) {
            const Change change(t);
            return t.sweep_host(size_of(count, "count out of range"));
        }, "count"_a)
        .def("mark_announced", [](PyTree& t, PyPath& p, Id start, Id stop) {
            const Change change(t);
            const Busy busy(p.busy);
            return t.mark_announced(p, size_of(start, "start out of range"), size_of(stop, "stop out of range"));
        }, "path"_a, "start"_a, "stop"_a)
        .def("worth_saving", [](const PyTree& t, const PyPath& p, Id start, Id stop, Id min_hits) {
            const Busy busy(t.busy), path_busy(p.busy);
            return t.worth_saving(p, size_of(start, "start out of range"), size_of(stop, "stop out of range"),
                                  size_of(min_hits, "min_hits out of range"));
        }, "path"_a, "start"_a, "stop"_a, "min_hits"_a)
        .def("retire", [](PyTree& t) {
            const Change change(t);
            return t.retire();
        })
        .def("sweep", [](PyTree& t, Id count) {
            const Change change(t);
            return ids_of(t.sweep(size_of(count, "count out of range")));
        }, "count"_a)
        .def_prop_ro("returning", [](const PyTree& t) { return t.returning(); })
        .def_prop_ro("idle", [](const PyTree& t) { return t.idle(); })
        .def("dismantle", [](PyTree& t) {
            const Change change(t);
            return t.dismantle();
        })
        .def("device_hashes", [](PyTree& t) {
            const Busy busy(t.busy);
            const std::vector<Key> keys = t.device_hashes();
            return bytes_of(keys.data(), keys.size());
        })
        .def("paths", [](PyTree& t) {
            const Busy busy(t.busy);
            nb::list result;
            for (const Leaf& leaf : t.leaves())
                result.append(nb::make_tuple(bytes_of(&leaf.root, 1), bytes_of(leaf.tokens.data(), leaf.tokens.size()),
                                             bytes_of(leaf.keys.data(), leaf.keys.size()),
                                             nb::bytes(leaf.states.data(), leaf.states.size())));
            return result;
        })
        .def("statistics", [](const PyTree& t) {
            const Busy busy(t.busy);
            const Statistics s = t.statistics();
            nb::dict d;
            d["nodes"] = s.nodes;
            d["device"] = s.device;
            d["host"] = s.host;
            d["evictable"] = s.evictable;
            d["referenced"] = s.referenced;
            d["loading"] = s.loading;
            d["offloading"] = s.offloading;
            d["bytes"] = t.bytes();
            return d;
        })
        .def("listing", [](PyTree& t, Id start, Id count) {
            const Busy busy(t.busy);
            const Listing found = t.listing(size_of(start, "start out of range"), size_of(count, "count out of range"));
            return nb::make_tuple(bytes_of(found.keys.data(), found.keys.size()),
                                  nb::bytes(found.states.data(), found.states.size()), found.next == kNil ? Id(-1) : Id(found.next));
        }, "start"_a, "count"_a)
        .def("check", [](const PyTree& t) {
            const Busy busy(t.busy);
            t.check();
        });
}

}  // namespace kvactors
