'use strict';
// The page of a run asks how far it is, while a process works on it. All texts are text nodes.
{
    const INTERVAL = 2000; // milliseconds
    const page = document.querySelector('[data-fleet-progress]');

    const part = name => page.querySelector(`[data-fleet="${name}"]`);

    function show(told) {
        const state = part('state');
        state.textContent = told.state;
        state.className = `fleet-state ${told.state.replaceAll(' ', '-')}`;
        for (const [state, count] of Object.entries(told.counts)) {
            const shown = part(`count-${state}`);
            if (shown !== null) {
                shown.textContent = count;
            }
        }
        for (const shown of page.querySelectorAll('[data-fleet^="count-"]')) {
            if (!(shown.dataset.fleet.slice('count-'.length) in told.counts)) {
                shown.textContent = 0;
            }
        }
        const bar = part('percent');
        if (bar === null) {
            // There was no step yet when the page was made.
            if (told.total) {
                window.location.reload();
            }
            return;
        }
        bar.value = told.percent;
        part('ended').textContent = told.ended;
        part('total').textContent = told.total;
        const busy = told.busy.length ? told.busy : ['nothing'];
        part('busy').replaceChildren(...busy.map(text => {
            const item = document.createElement('li');
            item.textContent = text;
            return item;
        }));
    }

    async function follow() {
        // Nobody looks at a page that is hidden.
        if (!document.hidden) {
            try {
                const answer = await fetch(page.dataset.fleetProgress, {credentials: 'same-origin'});
                if (answer.redirected || (answer.status >= 400 && answer.status < 500)) {
                    // The session has ended, or the run is gone: the page leads to the login, or says so.
                    window.location.reload();
                    return;
                }
                const told = await answer.json();
                show(told);
                if (!told.live) {
                    // It is over: the whole page says more.
                    window.location.reload();
                    return;
                }
            } catch (error) {
                // The site, or its database, does not answer; it may in two seconds.
            }
        }
        setTimeout(follow, INTERVAL);
    }

    if (page !== null) {
        setTimeout(follow, INTERVAL);
    }
}
