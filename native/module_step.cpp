// The Python module: decode steps of many paths in one call.
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>

#include "module.hpp"

namespace kvactors {
namespace {

// The tokens that a decode step appends to each of many paths: a copy.
class StepTokens {
public:
    explicit StepTokens(const nb::list& rows) {
        ends_.reserve(rows.size());
        for (nb::handle row : rows) {
            if (PyBytes_Check(row.ptr()) || PyByteArray_Check(row.ptr())) throw nb::type_error("tokens must be integers, not bytes");
            append(row, tokens_);
            ends_.push_back(tokens_.size());
        }
    }

    std::size_t rows() const { return ends_.size(); }
    const u32* row(std::size_t i) const { return tokens_.data() + start(i); }
    std::size_t count(std::size_t i) const { return ends_[i] - start(i); }

private:
    std::size_t start(std::size_t i) const { return i == 0 ? 0 : ends_[i - 1]; }

    Raw<u32> tokens_;
    std::vector<std::size_t> ends_;
};

// A row of a step that is carried out.
struct StepRow {
    PyPath* path;
    PyTree* tree;
    std::size_t index;
    Id computed;
    StepWork work;
    Committed done;
};

// All paths and trees of a step are in use until it ends, see Busy.
class StepBusy {
public:
    explicit StepBusy(const std::vector<StepRow>& rows) : paths_(rows.size()) {
        for (std::size_t i = 0; i < rows.size(); ++i) {
            paths_[i].emplace(rows[i].path->busy);
            if (std::find(trees_.begin(), trees_.end(), rows[i].tree) != trees_.end()) continue;
            trees_.push_back(rows[i].tree);
            changes_.emplace_back(std::make_unique<Change>(*rows[i].tree));
        }
    }

private:
    std::vector<std::optional<Busy>> paths_;
    std::vector<PyTree*> trees_;
    std::vector<std::unique_ptr<Change>> changes_;
};

// kind: the type of T, which takes time to look up.
template <class T>
T& item(const nb::list& items, std::size_t i, nb::handle kind) {
    const nb::handle one = PyList_GetItem(items.ptr(), Py_ssize_t(i));
    if (!one.type().is(kind)) throw nb::type_error("a step needs a path and its tree");
    return *nb::inst_ptr<T>(one);
}

Id number(const nb::list& items, std::size_t i) {
    PyObject* const one = PyList_GetItem(items.ptr(), Py_ssize_t(i));
    if (one == Py_None) return -1;
    const Id found = PyLong_AsLongLong(one);
    if (found == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
    return found;
}

nb::tuple step(const StepTokens& tokens, Id first, const nb::list& paths, const nb::list& trees, const nb::list& positions,
               const nb::list& computed, Id free, Id most, const nb::callable& take) {
    const std::size_t start = size_of(first, "first out of range"), count = paths.size();
    if (start + count > tokens.rows()) throw nb::value_error("more paths than rows");
    if (trees.size() != count || positions.size() != tokens.rows() || computed.size() != tokens.rows())
        throw nb::value_error("a step needs a tree for each path, and a position and computed tokens for each row");
    const nb::handle path_kind = nb::type<PyPath>(), tree_kind = nb::type<PyTree>();
    std::vector<StepRow> rows;
    rows.reserve(count);
    Id blocks = 0, work = 0;
    std::size_t entered = 0;
    for (std::size_t i = 0; i < count; ++i) {
        if (PyList_GetItem(paths.ptr(), Py_ssize_t(i)) == Py_None) continue;
        PyPath& path = item<PyPath>(paths, i, path_kind);
        PyTree& tree = item<PyTree>(trees, i, tree_kind);
        const Busy tree_busy(tree.busy), path_busy(path.busy);
        const std::size_t added = tokens.count(start + i);
        const Id upto = number(computed, start + i);
        if (Id(path.tokens.size()) != number(positions, start + i)) continue;
        const std::optional<StepWork> one = tree.plan_step(path, added, upto);
        const Id more = one ? Id(added / path.block_size + one->entered) : 0;
        if (!one || one->blocks > free - blocks || more > most - work) continue;
        blocks += one->blocks;
        work += more;
        entered += std::size_t(one->entered) * path.block_size;
        rows.push_back({&path, &tree, i, upto, *one, {}});
    }
    std::vector<u32> taken;
    if (blocks != 0)
        for (nb::handle block : nb::cast<nb::list>(take(blocks))) taken.push_back(block_of(nb::cast<Id>(block)));
    std::size_t kept = 0, used = 0;  // rows that get their blocks, and those
    for (const StepRow& row : rows) {
        if (row.work.blocks > taken.size() - used) continue;
        used += row.work.blocks;
        rows[kept++] = row;
    }
    rows.resize(kept);
    const StepBusy busy(rows);
    without_gil(entered, [&] {
        const u32* next = taken.data();
        for (StepRow& row : rows) {
            row.path->append(tokens.row(start + row.index), tokens.count(start + row.index));
            row.path->assign(u32(row.path->table.size()), next, row.work.blocks);
            next += row.work.blocks;
            if (row.computed >= 0) row.done = row.tree->commit(*row.path, u32(row.computed / row.path->block_size));
        }
    });
    const u32* next = taken.data();
    nb::list committed, grown, commits;
    auto row = rows.begin();
    for (std::size_t i = 0; i < count; ++i) {
        if (row == rows.end() || row->index != i) {
            committed.append(nb::int_(-1));
            continue;
        }
        committed.append(nb::steal(number_of(row->path->committed)));
        if (row->work.blocks != 0) grown.append(nb::make_tuple(i, numbers_of(next, row->work.blocks)));
        if (row->done.stop > row->done.start) commits.append(nb::make_tuple(paths[i], row->done.start, row->done.stop, row->done.adopted));
        next += row->work.blocks;
        ++row;
    }
    return nb::make_tuple(committed, grown, commits, ids_of(taken.data() + used, taken.size() - used));
}

}  // namespace

void bind_step(nb::module_& m) {
    nb::class_<StepTokens>(m, "StepTokens")
        .def(nb::init<const nb::list&>(), "rows"_a)
        .def_prop_ro("counts", [](const StepTokens& s) {
            nb::list counts;
            for (std::size_t i = 0; i < s.rows(); ++i) counts.append(nb::steal(number_of(u32(s.count(i)))));
            return counts;
        })
        .def("row", [](const StepTokens& s, Id i) {
            if (i < 0 || std::size_t(i) >= s.rows()) throw nb::value_error("row out of range");
            return bytes_of(s.row(std::size_t(i)), s.count(std::size_t(i)));
        }, "row"_a)
        .def("find_beyond", [](const StepTokens& s, const nb::list& positions, const nb::list& computed, Id first) -> Id {
            for (std::size_t i = std::size_t(first); i < s.rows(); ++i) {
                PyObject* const one = PyList_GetItem(computed.ptr(), Py_ssize_t(i));
                if (one == nullptr) throw nb::python_error();
                if (one == Py_None) continue;
                int overflow = PyLong_Check(one) && !PyBool_Check(one) ? 0 : 1;
                const Id value = overflow ? -1 : PyLong_AsLongLongAndOverflow(one, &overflow);
                if (overflow != 0 || value < 0 || value > number(positions, i) + Id(s.count(i))) return Id(i);
            }
            return -1;
        }, "positions"_a, "computed"_a, "first"_a)
        .def("step", &step, "first"_a, "paths"_a, "trees"_a, "positions"_a, "computed"_a, "free"_a, "most"_a, "take"_a);
}

}  // namespace kvactors
