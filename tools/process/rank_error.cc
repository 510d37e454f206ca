#include "rank_error.h"

#include <string>
#include <utility>

namespace ferry::tools {
namespace {

Problem named(int rank, Problem problem) {
    problem.where =
        "rank " + std::to_string(rank) + (problem.where.empty() ? "" : ": ") + problem.where;
    return problem;
}

}  // namespace

RankError::RankError(int rank, const Error& error)
    : Error(error.trouble(), named(rank, error.problem())), unnamed_(error) {}

}  // namespace ferry::tools
