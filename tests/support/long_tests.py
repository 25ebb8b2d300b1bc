"""Tests that only the commands with `-all` run, beside those marked `whole_matrix` in their files:
each takes seconds, and the default run has a shorter test of the same kind."""

import pytest

LONG = (
    # fix_path/test_vllm_alone.py compiles vLLM, and cli/test_compare_hf.py compares a production.
    "real_runs/test_production.py::test_production_decodes_and_scores[off]",
    # real_runs/test_ranks.py and test_deepspeed.py name ranks.
    "fix_path/test_rank_faults.py::test_a_fault_of_one_rank_is_named_with_it",
    # api/test_public.py calls the same functions.
    "real_runs/test_python_api.py::test_captures_are_made_and_compared",
    # HF's graft passes stay.
    "real_runs/test_graft_passes.py::test_megatron_and_its_ranks",
    # cli/test_interruptions.py goes on after a killed worker.
    "real_runs/test_ranks.py::test_a_rerun_goes_on_after_a_killed_rank",
    # Pairs of the matrix.
    "real_runs/test_training_engines.py::test_the_default_is_vllm_against_megatron",
    "real_runs/test_training_engines.py::test_tensor_parallel_megatron_parts_at_the_first_row_parallel_product",
    # Rounded frequencies of the trainer are named by the next test.
    "real_runs/test_deepspeed.py::test_kernels_refuse_rounded_frequencies",
    # Other values of the same test stay.
    "engines/test_family_variants.py::test_a_planted_fault_is_named_at_its_operator_and_side[gemma3_text",
    "engines/test_family_variants.py::test_a_planted_fault_is_named_at_its_operator_and_side[starcoder2",
    "engines/test_family_variants.py::test_two_attentions_of_transformers_are_healthy[glm4]",
    "kernels/ops/attention/test_shared_schedule.py::test_calls_that_share_a_schedule_have_the_bits_of_calls_alone[50-mixed]",
    "kernels/ops/attention/test_shared_schedule.py::test_calls_that_share_a_schedule_have_the_bits_of_calls_alone[None-decode]",
    "kernels/ops/attention/test_shared_schedule.py::test_a_call_that_is_asked_for_no_lse_has_the_same_bits[one]",
    "kernels/ops/attention/test_shared_schedule.py::test_a_call_that_is_asked_for_no_lse_has_the_same_bits[decode]",
    "kernels/ops/test_interpreter.py::test_prefill_equals_paged_decode_chunked_prefill_and_any_schedule[dtype0]",
    "kernels/ops/test_engine_operators.py::test_the_largest_logits_and_given_ids_have_the_bits_of_targets[triton-20-dtype1]",
    "kernels/test_hf_compiled.py::test_it_is_traced_whole_and_has_eager_bits[padded left]",
    "kernels/test_hf_compiled.py::test_it_is_traced_whole_and_has_eager_bits[a mask of ones]",
    "compare/test_divergence.py::test_a_fault_is_named_at_its_site_and_nowhere_else[layers.1.",
    "compare/test_divergence.py::test_a_missing_site_is_looked_through[layers.1.",
    "logs/monitor/test_run_monitor.py::test_a_healthy_run_raises_no_alarm[2-",
    "browser/test_access.py::test_nothing_serious[several]",
    "browser/test_access.py::test_nothing_serious[imported]",
    "real_runs/test_corrected_mixture.py::test_a_fault_is_named[megatron",
    "real_runs/test_corrected_mixture.py::test_a_fault_is_named[vllm-shared",
    "real_runs/test_sparse.py::test_a_fault_is_named[expert-weight-early-act]",
    # test_corrected_mixture.py has a router in bf16, and cli/test_vllm.py a fault of the rollout.
    "real_runs/test_sparse.py::test_a_router_in_bf16",
    "real_runs/test_sparse.py::test_a_fault_in_the_rollout_alone",
    "real_runs/test_sparse.py::test_faults_inside_other_engines",
    "real_runs/test_sparse.py::test_what_a_patch_makes_of_a_routers_output_is_named_there",
    # The processes that compile ahead, and what they miss: two tests of five stay.
    "compiled/test_compiled_ahead.py::test_without_its_server_a_process_compiles_itself",
    "compiled/test_compiled_ahead.py::test_what_was_not_compiled_while_it_started_is_noticed",
    "compiled/test_replayed_launches.py::test_a_cache_of_another_shape_is_noticed",
    "compiled/test_replayed_launches.py::test_a_shared_schedule_changes_no_launch",
    "cli/test_kernels.py::test_vllms_own_attention_is_named_in_it",
    "cli/test_vllm.py::test_a_pass_computes_its_own_prefixes",
    # The other tests of this file start vLLM in a process of its own, too.
    "fix_path/test_vllm_alone.py::test_a_model_in_a_process_of_its_own_has_the_kernels_too",
    "fix_path/test_vllm_batches.py::test_bits_do_not_depend_on_the_batch[embedded-float32-batches1-4]",
    "fix_path/test_engines.py::test_processed_logprobs_are_those_at_the_temperature[hf]",
    "fix_path/test_examples.py::test_an_example_runs[vllm]",
    "fix_path/test_examples.py::test_an_example_runs[megatron]",
    "fix_path/test_weight_update.py::test_a_weight_update_keeps_every_bit[embedded-hf-1]",
    "fix_path/test_weight_update.py::test_a_stale_layer_is_named[layers.2.-",
    # Kernels that are launched again: three of their faults stay.
    "compiled/test_replayed_launches.py::test_every_kernel_that_is_launched_again_is_triton_s_choice",
    "compiled/test_cuda_product.py::test_every_tile_has_the_registers_that_it_needs",
    # cli/test_kernels.py names an operator that one side computes itself.
    "real_runs/test_trl_loop.py::test_an_operator_that_the_trainer_computes_itself_is_named",
    # test_selftest.py plants faults in vLLM and Megatron, and the stale copy of a rank stays here.
    "real_runs/test_deepspeed.py::test_planted_faults_are_named_with_their_side",
    # Sparse layers: a case of each kind stays.
    "real_runs/test_sparse.py::test_replay_takes_away_what_routing_alone_has_done[megatron:ep=2,pp=2]",
    "real_runs/test_sparse.py::test_replay_takes_away_what_routing_alone_has_done[vllm]",
    "real_runs/test_sparse.py::test_replay_takes_away_what_routing_alone_has_done[hf]",
    "real_runs/test_sparse.py::test_a_fault_is_named[expert-flipped-experts]",
    "real_runs/test_sparse.py::test_a_fault_is_named[expert-missing-moe_out]",
    "real_runs/test_sparse.py::test_a_fault_is_named[expert-token-dropped-moe_out]",
    "real_runs/test_sparse.py::test_a_fault_at_an_operator_that_one_side_alone_shows[megatron]",
    "real_runs/test_sparse.py::test_rows_of_experts_in_another_order_are_not_blamed[summed_in_bf16",
    "real_runs/test_sparse.py::test_rows_of_experts_in_another_order_are_not_blamed[one_at_a_time",
    # Layouts of the matrix of pairs.
    "real_runs/test_training_engines.py::test_vllm_over_two_ranks",
    "real_runs/test_training_engines.py::test_bitwise_equal[megatron",
    "real_runs/test_training_engines.py::test_bitwise_equal[fsdp",
    # A torch that is too old stays.
    "real_runs/test_ranks.py::test_two_versions_of_torch_are_noted",
    # cli/test_compare_hf.py has swapped heads.
    "real_runs/test_planted_training.py::test_padding_on_the_other_side_is_named",
    "real_runs/test_planted_training.py::test_swapped_heads_are_named",
    # The other signal, and a worker whose parent ends, stay.
    "cli/test_interruptions.py::test_an_interrupted_run_ends_its_worker[real, SIGINT ignored-2]",
    "cli/test_kernels.py::test_captures_with_kernels_lie_beside_those_without",
    "cli/test_kernels.py::test_an_excluded_operator_is_named[hf-up_proj",
    "cli/test_kernels.py::test_an_excluded_operator_is_named[megatron",
    "cli/test_vllm.py::test_a_fault_of_vllms_decode_is_named_on_its_edge",
    "cli/test_vllm.py::test_chunked_and_packed_rows_find_their_place",
    "cli/test_traces.py::test_gate_derives_a_comparison_again",
    "cli/test_traces.py::test_two_samplings_differ_by_their_tokens",
    "cli/test_compare_hf.py::test_each_side_is_held_to_its_own_dtype[float32-bfloat16]",
    "cli/test_compare_hf.py::test_a_side_that_rounds_the_weights_of_the_other_is_compared",
    "engines/test_families.py::test_vllm_leaves_out_a_bias_of_qwen3[fsdp]",
    # An engine from outside with the kernels and without them stays.
    "engines/test_outside_engine.py::test_an_excluded_operator_stays_its_own",
    "engines/test_outside_engine.py::test_a_planted_mistake_is_named_with_its_side",
    "cli/test_probe.py::test_a_comparison_takes_an_earlier_probe_away",
    "cli/test_probe.py::test_two_healthy_sides_are_within_their_budgets",
    "cli/test_bad_input.py::test_enough_prompts_for_the_contract_that_judges",
    "cli/test_bad_input.py::test_a_dtype_that_the_config_leaves_out_is_that_of_the_weights",
    # Another dtype, or other sizes, of the same test stays.
    "kernels/ops/linear_logp/test_operator.py::test_tiles_and_chunks_change_no_bit[dtype1]",
    "kernels/ops/linear_logp/test_operator.py::test_the_kernels_for_tensor_maps_give_the_bits_of_those_for_pointers[331]",
    "kernels/ops/linear_logp/test_workspace.py::test_vocab_chunks_change_no_bit_of_the_gradients[dtype1-2]",
    "kernels/ops/linear_logp/test_workspace.py::test_vocab_chunks_change_no_bit_of_the_grpo_gradients[dtype0",
    "kernels/ops/linear_logp/test_workspace.py::test_vocab_chunks_change_no_bit_of_the_grpo_gradients[dtype2",
)
"""Beginnings of the tests' ids, from `tests/` on."""


def mark_long(items: list[pytest.Item]) -> None:
    """Marks the tests of LONG `whole_matrix`."""
    names = tuple(f"tests/{name}" for name in LONG)
    for item in items:
        if item.nodeid.startswith(names):
            item.add_marker(pytest.mark.whole_matrix)
