// The statistics of the eviction policy RETAIN: for each class of runs and each age, how many runs
// reached that age and how many of them were requested again in it, and the hit density that
// follows: the best ratio of expected hits to expected block-seconds over all ages at which a run
// could be given up.
//
// A class is the use count of a block, the gap between its request and the one that it continues,
// and the number of output tokens. With a hint of the caller it is the use count and the hint. The
// last block of a path has classes of its own.
#pragma once

#include <array>

#include "common.hpp"

namespace kvactors {

class LifeTables {
public:
    static constexpr u32 kBins = 34;  // [0, 1) s, then two an octave, up to 26 hours
    static constexpr u32 kUses = 6, kGaps = 5, kOutputs = 4, kHints = 6;
    // The root, the last blocks together, and for both kinds of blocks the classes by use count, by
    // gap and by output. The latter are the children of the former. Those by hint are children of
    // those by use count.
    static constexpr u32 kUse = 1 + kGaps * (1 + kOutputs) + kHints;
    static constexpr u32 kKind = kUses * kUse;
    static constexpr u32 kClasses = 2 + 2 * kKind;

    // inverted: density is negated, so that the best run is the first victim. For tests of the
    // guard. first: requests that are only observed, see `has_begun`.
    explicit LifeTables(bool inverted = false, u64 first = 0);

    static u32 bin_of(double age);
    static double start_of(u32 bin);
    // gap: negative for a request that continues none. output: negative if it is not known.
    // hint: see `hint_of`.
    static u32 class_of(bool last, u32 uses, double gap, long long output, u32 hint);
    // The session ends, or returns in so many seconds, negative if that is not known. 0: no hint.
    static u32 hint_of(bool ends, double returns_in);

    // A class is about to be used. Until then its densities are not computed.
    void use(u32 cls) {
        if (!used_[cls]) begin(cls);
    }
    void reach(u32 cls, u32 bin) { add(&Table::reached, cls, bin, weight_); }
    void unreach(u32 cls, u32 bin) { add(&Table::reached, cls, bin, -weight_); }
    void returned(u32 cls, u32 bin) { add(&Table::returned, cls, bin, weight_); }
    // A request has ended.
    void count_request();

    // Of the last computation, which is made for a class when it is first asked for.
    double density(u32 cls, u32 bin) {
        if (stale_[cls]) rank(cls);
        return density_[cls][bin];
    }
    // Whether the density is larger in the next bin.
    bool rises(u32 cls, u32 bin) { return bin + 1 < kBins && density(cls, bin + 1) > density(cls, bin); }
    // Of a run that has reached a bin, until the end of a later one.
    double chance_of_return(u32 cls, u32 from, u32 to) const;
    u64 computed() const { return computed_; }  // computations so far
    u64 requests() const { return requests_; }
    // Whether enough requests have been observed to choose victims by them.
    bool has_begun() const { return requests_ >= first_; }

private:
    using Row = std::array<double, kBins>;
    struct Table {
        Row reached{}, returned{};
    };

    void add(Row Table::*row, u32 cls, u32 bin, double weight);
    void begin(u32 cls);
    void draw(u32 cls);
    void rank(u32 cls);

    const bool inverted_;
    const u64 first_;
    u64 requests_ = 0, computed_ = 0;
    double weight_ = 1;  // of an observation now: it grows, so that earlier ones count less
    std::array<u32, kClasses> up_{};
    std::array<bool, kClasses> used_{};  // and those above them
    std::array<bool, kClasses> stale_{};  // the densities are not those of the chances yet
    std::vector<Table> tables_;
    std::vector<Row> chance_;  // of a return in each bin, for a run that has reached it
    std::vector<Row> density_;
};

}  // namespace kvactors
